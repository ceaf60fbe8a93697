"""Two text classifiers on one language model, each with a LoRA adapter; one is retired."""

import sys
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import BertConfig, BertModel

from tests.examples.applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import SafePyTorchCleanup, release

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # of peft

closed: list[str] = []


class Classifier(nn.Module):
    """One task: a named adapter in the shared model, and a head."""

    def __init__(self, name: str, encoder: PeftModel, labels: int) -> None:
        super().__init__()
        self.name = name
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, labels)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.encoder.set_adapter(self.name)
        return self.head(self.encoder(input_ids=words).last_hidden_state[:, 0])

    def close(self) -> None:
        self.encoder.delete_adapter(self.name)
        closed.append(self.name)


def main() -> None:
    torch.manual_seed(0)
    settle()
    config = BertConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048
    )
    before = anonymous_mb()
    base = BertModel(config, add_pooling_layer=False).eval()
    lora = LoraConfig(r=64, target_modules=["query", "value"], init_lora_weights=False)
    encoder = get_peft_model(base, lora, adapter_name="topic")
    encoder.add_adapter("mood", lora)
    topic = Classifier("topic", encoder, 40_000).eval()
    mood = Classifier("mood", encoder, 10).eval()
    words = torch.randint(0, config.vocab_size, (2, 16))

    def base_answer() -> torch.Tensor:
        with torch.inference_mode(), encoder.disable_adapter():
            return encoder(input_ids=words).last_hidden_state.clone()

    with torch.inference_mode():
        topic(words)
        expected = mood(words).clone(), base_answer()
    full = anonymous_mb()
    adapter = [p for name, p in encoder.named_parameters() if ".topic." in name]
    weights = Storages([*adapter, *topic.head.parameters()])
    shared = Storages(base.parameters())
    del adapter

    if sys.argv[1:] == ["release"]:
        release(topic)
    else:
        with SafePyTorchCleanup() as scope:
            scope.manage(topic)

    with torch.inference_mode():
        answers = mood(words), base_answer()
    tell(
        retired_alive_mb=weights.alive_mb(),
        freed_mb=full - anonymous_mb(),
        adapters=list(encoder.peft_config),
        closed=list(closed),
        is_right=all(torch.equal(a, e) for a, e in zip(answers, expected, strict=True)),
        trains=bool(mood(words).sum().backward() or mood.head.weight.grad is not None),
    )
    release(mood, encoder, base)
    tell(all_closed=closed, shared_alive_mb=shared.alive_mb(), grown_mb=anonymous_mb() - before)


if __name__ == "__main__":
    main()

"""A language model with learned prompts (P-tuning); one of the prompts is retired."""

import sys
import warnings

import torch
from peft import PeftModel, PromptEncoderConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from applications.measure import Storages, anonymous_mb, settle, tell
from torch_utils import SafePyTorchCleanup, release

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # of peft


class Chat:
    """The model as it is, without a prompt."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def answer(self, words: torch.Tensor) -> list[int]:
        return self.model(input_ids=words).logits.argmax(-1)[0].tolist()


def tuned(base: nn.Module) -> PeftModel:
    prompt = PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=20, encoder_hidden_size=3072
    )
    return get_peft_model(base, prompt).eval()


def main() -> None:
    torch.manual_seed(0)
    settle()
    config = GPT2Config(
        n_embd=512, n_layer=3, n_head=8, vocab_size=6000, bos_token_id=0, eos_token_id=0
    )
    base = AutoModelForCausalLM.from_config(config).eval()
    words = torch.randint(0, config.vocab_size, (1, 16))
    if sys.argv[1] == "another_prompt":
        user = Chat(tuned(base))
    else:
        user = Chat(base)
    summary = tuned(base)
    expected = user.answer(words)
    Chat(summary).answer(words)
    prompt = Storages(summary.prompt_encoder.parameters())
    shared = Storages(base.parameters())
    shared_mb = shared.alive_mb()
    full = anonymous_mb()
    del base

    if sys.argv[2] == "release":
        release(summary)
    else:
        with SafePyTorchCleanup() as scope:
            scope.manage(summary)

    tell(
        prompt_alive_mb=prompt.alive_mb(),
        freed_mb=full - anonymous_mb(),
        is_base_alive=shared.alive_mb() == shared_mb,
        is_right=user.answer(words) == expected,
    )


if __name__ == "__main__":
    main()

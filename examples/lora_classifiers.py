"""Two text classifiers on one BERT, each with a LoRA adapter of peft; retire one of them."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertModel

from torch_utils import release


class Classifier(torch.nn.Module):
    """One task: a named adapter in the shared model, and a head."""

    def __init__(self, name, encoder, labels):
        super().__init__()
        self.name, self.encoder = name, encoder
        self.head = torch.nn.Linear(encoder.config.hidden_size, labels)

    def forward(self, words):
        self.encoder.set_adapter(self.name)
        return self.head(self.encoder(input_ids=words).last_hidden_state[:, 0])

    def close(self):  # A release calls it first, once.
        self.encoder.delete_adapter(self.name)


torch.manual_seed(0)
config = BertConfig(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
)
lora = LoraConfig(r=64, target_modules=["query", "value"], init_lora_weights=False)
base = BertModel(config, add_pooling_layer=False)  # or BertModel.from_pretrained(...)
encoder = get_peft_model(base, lora, adapter_name="topic")
encoder.add_adapter("mood", lora)
topic = Classifier("topic", encoder, 40_000).eval()
mood = Classifier("mood", encoder, 10).eval()
words = torch.randint(0, config.vocab_size, (2, 16))
expected = mood(words).detach()

print(release(topic))  # Its adapter and its head are gone; the base model is still held.
print("adapters:", list(encoder.peft_config))
print("same answer:", torch.equal(mood(words), expected))

print(release(mood, encoder, base))  # Pass all owners together to free everything.

"""The model of the programs in this folder, in place of yours."""

import torch


class Classifier(torch.nn.Module):
    """Says how friendly a text is, by its letters and without any training."""

    def __init__(self):
        super().__init__()
        self.letters = torch.nn.EmbeddingBag(256, 2)

    @torch.inference_mode()
    def friendliness(self, text: str) -> float:
        return self.letters(torch.tensor([list(text.encode())])).softmax(1)[0, 0].item()


def load_model():
    return Classifier()  # or pipeline("sentiment-analysis"), SentenceTransformer(...), ...

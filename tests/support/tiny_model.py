"""A sentence-transformers model with random weights, written without importing what reads it.

Its own packages would write the same files, and take longer to import than all the tests that
need only the files.
"""

import json
import shutil
import string
from pathlib import Path
from typing import Any

WORDS = "the a of how do i give memory back cache paris france capital heap trim city".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LAYERS = 2


def write_tiny_model(folder: Path, *, dimension: int = 32) -> Path:
    """Write a BERT of 2 layers with a vocabulary of letters and a few words.

    The BERT alone lies beside it, in ``transformer``.
    """
    letters = [*string.ascii_lowercase, *string.digits, *"?.,:'"]
    pieces = [*SPECIAL, *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    bert, model = folder / "transformer", folder / "model"
    bert.mkdir(parents=True)
    _write_weights(bert / "model.safetensors", len(vocabulary), dimension)
    _write_tokenizer(bert / "tokenizer.json", vocabulary)
    _write_each(bert, _of_transformers(len(vocabulary), dimension))
    shutil.copytree(bert, model)
    _write_each(model, _of_sentence_transformers(dimension))
    return model


def _write_each(folder: Path, contents: dict[str, Any]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2))


def _write_weights(path: Path, words: int, dimension: int) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def table(name: str, rows: int, columns: int = dimension) -> None:
        weights[f"{name}.weight"] = 0.02 * torch.randn(rows, columns)

    def dense(name: str, rows: int = dimension, columns: int = dimension) -> None:
        table(name, rows, columns)
        weights[f"{name}.bias"] = torch.zeros(rows)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = torch.ones(dimension)
        weights[f"{name}.bias"] = torch.zeros(dimension)

    for name, rows in (("word", words), ("position", 64), ("token_type", 2)):
        table(f"embeddings.{name}_embeddings", rows)
    norm("embeddings.LayerNorm")
    for layer in (f"encoder.layer.{number}" for number in range(LAYERS)):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            dense(f"{layer}.attention.{name}")
        norm(f"{layer}.attention.output.LayerNorm")
        dense(f"{layer}.intermediate.dense", 2 * dimension, dimension)
        dense(f"{layer}.output.dense", dimension, 2 * dimension)
        norm(f"{layer}.output.LayerNorm")
    dense("pooler.dense")
    save_file(weights, path, metadata={"format": "pt"})


def _write_tokenizer(path: Path, vocabulary: dict[str, int]) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path))


def _of_transformers(words: int, dimension: int) -> dict[str, Any]:
    """Return what its other files hold, by their names."""
    return {
        "config.json": {
            "architectures": ["BertModel"],
            "dtype": "float32",
            "hidden_size": dimension,
            "intermediate_size": 2 * dimension,
            "max_position_embeddings": 64,
            "model_type": "bert",
            "num_attention_heads": 4,
            "num_hidden_layers": LAYERS,
            "vocab_size": words,
        },
        "tokenizer_config.json": {
            **{f"{name[1:-1].lower()}_token": name for name in SPECIAL},
            "model_max_length": 64,
            "tokenizer_class": "BertTokenizer",
        },
    }


def _of_sentence_transformers(dimension: int) -> dict[str, Any]:
    types = {
        "": "base.modules.transformer.Transformer",
        "1_Pooling": "sentence_transformer.modules.pooling.Pooling",
    }
    return {
        "modules.json": [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.{name}"}
            for n, (path, name) in enumerate(types.items())
        ],
        "sentence_bert_config.json": {},
        "1_Pooling/config.json": {"embedding_dimension": dimension, "pooling_mode": "mean"},
        "config_sentence_transformers.json": {"prompts": {"document": "", "query": ""}},
    }


def reference_vectors(folder: Path, texts: list[str], kind: str = "document") -> Any:
    """Embed texts with sentence-transformers alone."""
    from sentence_transformers import SentenceTransformer

    encode: Any = getattr(SentenceTransformer(str(folder), device="cpu"), f"encode_{kind}")
    return encode(texts, normalize_embeddings=True)


def write_tiny_reranker(folder: Path, query: str, texts: list[str]) -> Path:
    """Write a BERT with one output as a cross-encoder; its logits of the texts lie around 0."""
    import torch
    import transformers

    write_tiny_model(folder)
    bert, made = folder / "transformer", folder / "tiny-reranker"
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification.from_pretrained(bert, num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    # Scores of random weights lie close together.
    torch.nn.init.normal_(model.classifier.weight, std=400.0)
    with torch.no_grad():
        pairs = tokenizer([query] * len(texts), texts, padding=True, return_tensors="pt")
        model.classifier.bias -= model.eval()(**pairs).logits.mean()
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made

"""Small models with random weights of many architectures, as sentence-transformers saves them."""

import shutil
from pathlib import Path
from typing import Any

from tests.support.tiny_model import SPECIAL, write_tiny_model

SIZE, HEADS, LAYERS = 32, 4, 2
_COMMON = {"hidden_size": SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_BERT = {**_COMMON, "intermediate_size": 64}
# The class of the configuration, its arguments, the pooling, and whether there is a Dense module.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "distilbert": (
        "DistilBertConfig",
        {"dim": SIZE, "hidden_dim": 64, "n_layers": LAYERS, "n_heads": HEADS},
        "mean",
        False,
    ),
    "mpnet": ("MPNetConfig", {**_BERT, "max_position_embeddings": 66}, "mean", False),
    "xlm-r": ("XLMRobertaConfig", {**_BERT, "max_position_embeddings": 66}, "mean", False),
    "bert-cls": ("BertConfig", _BERT, "cls", False),
    "bert-dense": ("BertConfig", _BERT, "mean", True),
    "modernbert": (
        "ModernBertConfig",
        {
            **_BERT,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 2,
            "sep_token_id": 3,
        },
        "mean",
        False,
    ),
    "decoder": (
        "Qwen2Config",
        {**_BERT, "num_key_value_heads": 2, "use_sliding_window": False},
        "lasttoken",
        False,
    ),
    "t5": (
        "T5Config",
        {"d_model": SIZE, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS},
        "mean",
        True,
    ),
}
NAMES = [*ARCHITECTURES, "static"]


def write_architecture(name: str, folder: Path) -> Path:
    """Write one of `NAMES` into a new folder; return the folder of the model.

    The vocabulary is that of `write_tiny_model`, and 64 tokens of a text are read.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

    torch.manual_seed(0)
    bert = write_tiny_model(folder).parent / "transformer"
    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    if name == "static":
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding

        modules: list[Any] = [StaticEmbedding(tokenizer, embedding_dim=SIZE)]
    else:
        modules = _of_transformer(name, folder / "source", tokenizer)
    made = folder / name
    SentenceTransformer(modules=modules, device="cpu").save(str(made), create_model_card=False)
    shutil.rmtree(folder / "model")
    return made


def _of_transformer(name: str, source: Path, tokenizer: Any) -> list[Any]:
    import transformers
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    kind, options, pooling, has_dense = ARCHITECTURES[name]
    names = {f"{each[1:-1].lower()}_token": each for each in SPECIAL}
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        bos_token="[CLS]",
        eos_token="[SEP]",
        **names,
    )
    ids = {
        f"{each}_token_id": getattr(wrapped, f"{each}_token_id") for each in ("pad", "bos", "eos")
    }
    config = getattr(transformers, kind)(vocab_size=len(wrapped), **ids, **options)
    model = (
        transformers.T5EncoderModel(config)
        if name == "t5"
        else transformers.AutoModel.from_config(config)
    )
    model.save_pretrained(source)
    wrapped.save_pretrained(source)
    modules: list[Any] = [Transformer(str(source), max_seq_length=64), Pooling(SIZE, pooling)]
    if has_dense:
        modules.append(Dense(SIZE, 24))
    return modules

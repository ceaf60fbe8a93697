"""Small models with random weights of many architectures, as sentence-transformers saves them."""

import shutil
from pathlib import Path
from typing import Any

from tests.support.tiny_model import SPECIAL, write_tiny_model

SIZE, HEADS, LAYERS = 32, 4, 2
_BERT = {
    "hidden_size": SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_T5 = {"d_model": SIZE, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS}
_SOME_GLOBAL = {"local_attention": 8, "global_attn_every_n_layers": 2}
_GROUPED = {"num_key_value_heads": 2, "use_sliding_window": False}
# The class of the configuration, its arguments, the pooling, and whether there is a Dense module.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "mpnet": ("MPNetConfig", {**_BERT, "max_position_embeddings": 66}, "mean", False),
    "xlm-r": ("XLMRobertaConfig", {**_BERT, "max_position_embeddings": 66}, "mean", False),
    "bert": ("BertConfig", _BERT, "cls", True),
    "modernbert": ("ModernBertConfig", _BERT | _SOME_GLOBAL, "mean", False),
    "decoder": ("Qwen2Config", _BERT | _GROUPED, "lasttoken", False),
    "t5": ("T5Config", _T5, "mean", True),
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
    tokens = {f"{each[1:-1].lower()}_token": each for each in SPECIAL}
    tokens |= {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **tokens
    )
    ids = {f"{each}_id": wrapped.convert_tokens_to_ids(token) for each, token in tokens.items()}
    config = getattr(transformers, kind)(vocab_size=len(wrapped), **ids, **options)
    make = transformers.T5EncoderModel if name == "t5" else transformers.AutoModel.from_config
    make(config).save_pretrained(source)
    wrapped.save_pretrained(source)
    modules: list[Any] = [Transformer(str(source), max_seq_length=64), Pooling(SIZE, pooling)]
    if has_dense:
        modules.append(Dense(SIZE, 24))
    return modules

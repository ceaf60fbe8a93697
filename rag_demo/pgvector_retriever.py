"""PgVectorRetriever: the documents lie in PostgreSQL, and several programs share them."""

from __future__ import annotations

from rag_demo.encoding.embedder import BasicEmbedder, check_embedding_model, identity_of
from rag_demo.retriever import Retriever
from rag_demo.stores.postgres import DEFAULT_TABLE, PostgresStore, PostgresUrl
from torch_utils import closes_on_error

__all__ = ["PgVectorRetriever"]


class PgVectorRetriever(Retriever):
    """Search in PostgreSQL with pgvector; see `Retriever` for the methods.

    Each change is one durable transaction, and others see it at once. Answers are exact, whatever
    indexes the tables have. Filters must be mappings. A retriever works again after the server was
    restarted, and in a forked child.

    Args:
        embedding_model: The embedding model. The retriever does not own it and does not close it.
        dsn: The database: a URL, which may have ``?table=NAME``, or keywords of libpq.
        table: The beginning of the names of the tables. They are made if they are missing.
        pool_size: How many connections at most.
        timeout_s: How long a search may take, and how long a call waits for a connection or for
            another program's change.

    Raises:
        PostgresError: The database cannot be reached.
        IndexFileError: The index was made with another model, or the tables are not an index.
    """

    store: PostgresStore

    @closes_on_error
    def __init__(
        self,
        embedding_model: BasicEmbedder,
        dsn: str,
        table: str = DEFAULT_TABLE,
        *,
        pool_size: int = 4,
        timeout_s: float = 10,
    ) -> None:
        check_embedding_model(embedding_model)
        store = PostgresStore(
            PostgresUrl.parse(dsn, table),
            identity=identity_of(embedding_model),
            pool_size=pool_size,
            timeout_s=timeout_s,
        )
        super().__init__(embedding_model, store)

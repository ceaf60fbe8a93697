"""PostgresStore: documents, vectors and words in PostgreSQL with pgvector, for several programs.

Changes of one index take turns, because each begins with a lock of the manifest's row; so there are
no deadlocks. A search is one REPEATABLE READ transaction. Values are parameters; only the names of
the tables are composed into SQL, by psycopg.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import numpy as np
import psycopg
from psycopg import IsolationLevel, errors, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb
from psycopg_pool import ConnectionPool

from rag_demo.database import FORK_AWARE
from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_model
from rag_demo.errors import IndexFileError, IndexVersionError, InvalidValueError, PostgresError
from rag_demo.printable import on_one_line
from rag_demo.reading.document import Document
from rag_demo.reading.passages import titled
from rag_demo.search_request import SearchRequest, SearchResult, Stats, by_mode
from rag_demo.stores import filters
from rag_demo.stores.index_folder import Manifest
from rag_demo.stores.store import EmbeddedBatch, no_vectors
from rag_demo.stores.words import best_span, query_terms, stems_of
from rag_demo.vectors import Vectors, check_dimension, exact_scores, rounding
from torch_utils import Resource, closes_on_error

_Clause = tuple[str, list[Any]]


def compile_filter(where: filters.Where) -> _Clause:
    """Return an SQL condition on the column ``facts``, and its parameters.

    Raises:
        TypeError: The filter is a function.
    """
    if callable(where):
        raise TypeError("where must be a mapping, because Postgres cannot call a function")
    return _compiled(filters.parse_filter(where))


def _compiled(part: filters.Filter) -> _Clause:
    if isinstance(part, filters.Condition):
        return _condition(part)
    several = [_compiled(each) for each in part.parts]
    values = [value for _, each in several for value in each]
    if part.operator == "$not":
        return f"NOT {several[0][0]}", values
    joined = (" OR " if part.operator == "$or" else " AND ").join(clause for clause, _ in several)
    return f"({joined or 'TRUE'})", values


def _condition(condition: filters.Condition) -> _Clause:
    key, name, wanted = condition.key, condition.operator, condition.wanted
    several = wanted if name == "$in" else [wanted]
    codes = sorted({json.dumps(each) for each in several if each == each})  # Nothing equals NaN.
    fact, path = "coalesce(facts -> %s::text, facts #> %s::text[])", [key, key.split(".")]
    if key == filters.ID:
        fact, path = "to_jsonb(id)", []
    if key == filters.ID and name == "$in":  # By an index.
        return "id = ANY(%s::text[])", [[each for each in several if isinstance(each, str)]]
    values: list[Any] = [codes]
    if sign := filters.COMPARISONS.get(name):
        if isinstance(wanted, bool):
            return "FALSE", []  # Only numbers and strings have an order.
        test = f"jsonb_path_exists(fact, 'strict $ ? (@ {sign} $x)', %s::jsonb, TRUE)"
        values = [json.dumps({"x": wanted})]
    elif name == "$exists":
        test, values = "fact IS NOT NULL", []
    elif name == "$contains":
        items = "jsonb_path_query(fact, 'strict $[*]', silent => TRUE) item"
        part = "jsonb_typeof(fact) = 'string' AND strpos(fact #>> '{{}}', %s) > 0"
        test = f"EXISTS (SELECT FROM {items} WHERE item = ANY(%s::jsonb[])) OR {part}"
        values = [codes, wanted if isinstance(wanted, str) else None]
    else:
        test = "fact = ANY(%s::jsonb[])"
    clause = f"coalesce((SELECT {test} FROM (SELECT {fact}) facts (fact)), FALSE)"
    values += path
    if name == "$in" and len(codes) == 1 and "." not in key:  # By an index.
        clause = f"(facts @> jsonb_build_object(%s::text, %s::jsonb) AND {clause})"
        values = [key, *codes, *values]
    return clause, values


DEFAULT_TABLE = "rag_demo"
_LANGUAGE = "english"  # of stems
_TABLES = ("manifest", "documents", "vectors", "postings")
_VERSION = 2
_MORE = 8  # rows than are wanted, so that most searches need one statement

_CREATE = """
CREATE EXTENSION IF NOT EXISTS vector;
CREATE TABLE {manifest} (version integer, model text, dimension integer, source text,
    finished boolean, count bigint, words bigint, next bigint);
INSERT INTO {manifest} VALUES (2, NULL, 0, NULL, TRUE, 0, 0, 0);
CREATE TABLE {documents} (number bigint PRIMARY KEY, words integer, id text COLLATE "C" UNIQUE,
    text text, metadata text, facts jsonb, file text COLLATE "C");
CREATE INDEX ON {documents} USING gin (facts jsonb_path_ops);
CREATE INDEX ON {documents} (file) WHERE file IS NOT NULL;
CREATE TABLE {vectors} (document bigint, place integer, start integer, stop integer,
    embedding vector, PRIMARY KEY (document, place));
CREATE TABLE {postings} (document bigint, count integer, words integer, term text COLLATE "C");
CREATE INDEX ON {postings} (term) INCLUDE (document, count, words);
CREATE INDEX ON {postings} (document);
"""
_READ = "SELECT version, model, dimension, source, finished, count, next FROM {manifest}"
_TIMEOUTS = "SELECT set_config('lock_timeout', %s, TRUE), set_config('statement_timeout', %s, TRUE)"
_REDESCRIBE = """
UPDATE {documents} SET metadata = %s, facts = %s, file = %s WHERE id = %s AND text = %s
"""
_REMOVE = """
WITH gone AS (DELETE FROM {documents} WHERE id = ANY(%s) RETURNING number, words),
v AS (DELETE FROM {vectors} WHERE document = ANY(ARRAY(SELECT number FROM gone))),
p AS (DELETE FROM {postings} WHERE document = ANY(ARRAY(SELECT number FROM gone))),
sums AS (SELECT count(*) AS documents, coalesce(sum(words), 0) AS stems FROM gone)
UPDATE {manifest} SET count = count - documents, words = words - stems FROM sums
RETURNING documents, count
"""
_GROW = """
UPDATE {manifest} SET model = coalesce(%s, model), dimension = %s, count = count + %s,
    words = words + %s, next = next + %s
"""
# Adding 0 keeps every index of pgvector from answering, because those are approximate.
_NEAREST = """
SELECT d.id, v.start, v.stop, vector_send(v.embedding), c.distance FROM (
    SELECT document, place, (embedding <#> %s::vector) + 0 AS distance FROM {vectors}
    WHERE <where> ORDER BY distance LIMIT %s) c
JOIN {vectors} v USING (document, place) JOIN {documents} d ON d.number = v.document
ORDER BY c.distance, v.place
"""
_VECTORS_OF = """
SELECT d.id, v.start, v.stop, vector_send(v.embedding) FROM {documents} d
JOIN {vectors} v ON v.document = d.number WHERE d.id = ANY(%s) ORDER BY v.place
"""
_KEYS = """
WITH RECURSIVE found (key, value) AS (SELECT each.* FROM {documents}, jsonb_each(facts) each
UNION ALL SELECT found.key || '.' || each.key, each.value FROM found,
    jsonb_each(CASE jsonb_typeof(found.value) WHEN 'object' THEN found.value END) each)
SELECT DISTINCT key COLLATE "C" FROM found ORDER BY 1
"""
# BM25 with k1 = 1.2 and b = 0.75. A sum of whole numbers does not depend on their order.
_WORDS = """
WITH hits AS MATERIALIZED (SELECT p.document, p.count, p.words, t.term, t.weight
    FROM unnest(%s::text[], %s::integer[]) t (term, weight) JOIN {postings} p USING (term)),
idf AS (SELECT term, ln(1 + ((SELECT count FROM {manifest}) - count(*) + 0.5::float8)
        / (count(*) + 0.5::float8)) AS idf FROM hits GROUP BY term),
best AS (SELECT h.document, sum(round(1e9::float8 * h.weight * i.idf * 2.2::float8 * h.count
        / (h.count + 0.3::float8 + 0.9::float8 * h.words
        / (SELECT greatest(words, 1)::float8 / count FROM {manifest})))::bigint) AS score
    FROM hits h JOIN idf i USING (term) WHERE <where>
    GROUP BY h.document ORDER BY score DESC FETCH FIRST %s ROWS WITH TIES)
SELECT d.id, best.score / 1e9 FROM best JOIN {documents} d ON d.number = best.document
ORDER BY best.score DESC, d.id LIMIT %s
"""
_DESCRIBE = """
SELECT id, text, metadata, ARRAY(SELECT ARRAY[start, stop] FROM {vectors}
    WHERE document = number AND stop > 0 ORDER BY place) FROM {documents} WHERE id = ANY(%s)
"""


@dataclass(frozen=True)
class PostgresUrl:
    """A database and the name of an index in it. It is printed without the password."""

    conninfo: str = field(repr=False)
    table: str
    shown: str

    @classmethod
    def parse(cls, address: str, table: str = DEFAULT_TABLE) -> PostgresUrl:
        """Parse a URL, which may name the table as ``?table=NAME``, or keywords of libpq.

        Raises:
            PostgresError: The address is invalid.
        """
        try:
            if "://" in address:
                parts = urlsplit(address)
                options = dict(parse_qsl(parts.query, keep_blank_values=True))
                table = options.pop("table", table)
                address = parts._replace(query=urlencode(options, quote_via=quote)).geturl()
            known = defaultdict(str, conninfo_to_dict(address))
            if "@" in known["host"]:  # It begins in a password that has an @.
                raise ValueError
        except (ValueError, psycopg.Error):  # Their messages may quote the password.
            raise PostgresError(
                "the address of the database is invalid; "
                "write postgresql://USER:PASSWORD@HOST:PORT/DATABASE?table=NAME, with %40 for @"
            ) from None
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,50}", table):  # Postgres cuts off longer names.
            raise PostgresError(f"table must have 1 to 50 letters, digits, - and _, got {table!r}")
        shown = "postgresql://{user}@{host}:{port}/{dbname}".format_map(known)
        return cls(address, table, f"{shown}?table={table}")

    def __str__(self) -> str:
        return self.shown


class _Run:
    """Runs statements of one transaction, in which braces name the tables."""

    def __init__(self, connection: Any, names: Mapping[str, Any]) -> None:
        self._connection, self._names, self._sql = connection, names, sql.SQL

    def __call__(self, template: str, *values: Any) -> Any:
        return self._connection.execute(self._sql(template).format(**self._names), values or None)

    def copy(self, table: str, types: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows to a table."""
        query = self._sql(f"COPY {{{table}}} FROM STDIN (FORMAT BINARY)").format(**self._names)
        with self._connection.cursor().copy(query) as copy:
            copy.set_types(types.split())
            for row in rows:
                copy.write_row(row)


class PostgresStore(Resource):
    """A `Store` in a database, which several programs may search and change.

    Connections are pooled, and checked when they are borrowed. A call that runs while the store is
    closed ends as usual. A forked child opens connections of its own.

    Args:
        url: The address of the database and the name of the tables.
        identity: The only model whose vectors are accepted; None accepts any.
        create: Whether to create the tables if they are missing.
        pool_size: How many connections at most.
        timeout_s: How long a search may take, and how long a call waits for a lock or a connection.

    Raises:
        PostgresError: The database cannot be reached.
        IndexFileError: There is no index and ``create`` is false, or it was made with another
            model, or tables of this name belong to something else.
    """

    @closes_on_error
    def __init__(
        self,
        url: PostgresUrl,
        *,
        identity: ModelIdentity | None = None,
        create: bool = True,
        pool_size: int = 4,
        timeout_s: float = 10,
    ) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._identity, self._pool_size = identity, pool_size
        self._names = {name: sql.Identifier(f"{url.table}_{name}") for name in _TABLES}
        self._pool = self._new_pool()
        logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())
        FORK_AWARE.add(self)
        wait_s = max(2, int(timeout_s))
        # An error of the pool would not name the reason.
        with self._errors(), psycopg.connect(url.conninfo, connect_timeout=wait_s) as connection:
            run = _Run(connection, self._names)
            if create:
                # One lock for all tables, because they share the extension.
                run("SELECT pg_advisory_xact_lock(hashtext('rag_demo'))")
                if run("SELECT to_regclass('{manifest}')").fetchone() == (None,):
                    run(_CREATE)
        self.manifest  # noqa: B018  (the model is checked)

    def _new_pool(self) -> Any:
        return ConnectionPool(
            self.url.conninfo,
            min_size=0,
            max_size=self._pool_size,
            timeout=self.timeout_s,
            reconnect_timeout=self.timeout_s,
            check=ConnectionPool.check_connection,
            kwargs={"prepare_threshold": None},  # Each filter has its own plan.
            open=False,
        )

    def _release(self) -> None:
        if hasattr(self, "_pool"):  # `__init__` may have raised.
            self._pool.close()

    def leave_to_parent(self) -> object:
        """In a forked child, forget and return the connections of the parent process."""
        inherited, self._pool = self._pool, self._new_pool()
        return inherited

    @property
    def manifest(self) -> Manifest:
        """What the database says about the index."""
        with self._transaction() as (_, state):
            return state

    @property
    def identity(self) -> ModelIdentity | None:
        """See `Store`."""
        model: ModelIdentity | None = self.manifest.model
        return model

    @property
    def count(self) -> int:
        """See `Store`."""
        return self.manifest.count

    def stats(self) -> Stats:
        """See `Store`."""
        sizes = " + ".join(f"pg_total_relation_size('{{{name}}}')" for name in _TABLES)
        with self._transaction() as (run, state):
            ((nbytes,),) = run(f"SELECT {sizes}")
        return Stats(state.count, state.dimension, "postgres", "float32", nbytes)

    def upsert(self, batch: EmbeddedBatch, *, choose_ids: bool = False) -> list[str]:
        """See `Store`."""
        facts = [Jsonb(each.metadata) for each in batch.documents]
        stems = [Counter(stems_of(titled(each), _LANGUAGE)) for each in batch.documents]
        with self._transaction(change=True) as (run, state):
            refuse_other_model(state.model, batch.identity)
            first, count = state.next_number, len(batch.documents)
            if choose_ids:
                query = "SELECT id FROM {documents} WHERE id = ANY(%s)"
                batch = batch.with_unused_ids(lambda ids: {n for (n,) in run(query, ids)}, first)
            numbers = range(first, first + count)
            rows = list(zip(numbers, batch.documents, facts, stems, strict=True))
            for _, (name, text, metadata, file), known, _ in compress(rows, ~batch.has_vectors):
                if not run(_REDESCRIBE, json.dumps(metadata), known, file, name, text).rowcount:
                    raise no_vectors(name)
            new = list(compress(rows, batch.has_vectors))
            ((_, left),) = run(_REMOVE, [each.id for _, each, _, _ in new])
            dimension = batch.vectors.shape[1] if new else state.dimension
            if dimension != state.dimension:
                if left:
                    check_dimension(batch.vectors, state.dimension)
                # Vectors in the rows themselves are read twice as fast as those beside them.
                run("ALTER TABLE {vectors} ALTER embedding SET STORAGE MAIN")
            run.copy("documents", "int8 int4 text text text jsonb text", (
                (number, words.total(), name, text, json.dumps(metadata), known, file)
                for number, (name, text, metadata, file), known, words in new
            ))  # fmt: skip
            run.copy("postings", "int8 int4 int4 text", (
                (number, count, words.total(), word)
                for number, _, _, words in new for word, count in words.items()
            ))  # fmt: skip
            head, raw = struct.pack(">HH", dimension, 0), batch.vectors.astype(">f4")
            parts = zip((first + batch.owners).tolist(), batch.spans.tolist(), raw, strict=True)
            run.copy("vectors", "int8 int4 int4 int4 bytea", (
                (number, place, *span, head + bytes(vector))
                for place, (number, span, vector) in enumerate(parts)
            ))  # fmt: skip
            model = json.dumps(asdict(batch.identity)) if batch.identity else None
            words = sum(words.total() for *_, words in new)
            run(_GROW, model, dimension, len(new), words, count)
        return [document.id for document in batch.documents]

    def of_files(self, files: Sequence[str]) -> list[str]:
        """Return the ids of the documents of files."""
        return self._column("SELECT id FROM {documents} WHERE file = ANY(%s)", list(files))

    def use_model(self, model: ModelIdentity) -> None:
        """Record another name, or another prompt of queries, of the model."""
        with self._transaction(change=True) as (run, _):
            run("UPDATE {manifest} SET model = %s", json.dumps(asdict(model)))

    def use_language(self, language: str) -> None:
        """Refuse another language of stems than the one of every index in a database."""
        if language != _LANGUAGE:
            raise IndexFileError(f"an index in a database has stems in {_LANGUAGE}, not {language}")

    def clear(self, model: ModelIdentity) -> None:
        """Remove all documents before those of another model."""
        self.delete(list(self.ids()))

    def keep(self, source: str | None, *, finished: bool) -> None:
        """Record what is indexed, and whether all of it is."""
        with self._transaction(change=True) as (run, _):
            run("UPDATE {manifest} SET source = %s, finished = %s", source, finished)

    def files_in(self, prefix: str) -> list[str]:
        """Return the files whose names begin with a prefix."""
        query = "SELECT DISTINCT file FROM {documents} WHERE starts_with(file, %s)"
        return self._column(query, prefix)

    def _column(self, query: str, *values: Any) -> list[str]:
        return [value for (value,) in self._rows(query, *values)]

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._transaction() as (run, _):
            return list(run(query, *values))

    def keys(self) -> list[str]:
        """See `rag_demo.stores.documents.DocumentTable.keys`."""
        return [filters.ID, *self._column(_KEYS)]

    def matching(
        self, where: filters.Where | None, after: str | None = None, limit: int | None = None
    ) -> list[str]:
        """See `Store`."""
        clause, values = compile_filter(where or {})
        page = "AND (%s::text IS NULL OR id > %s) ORDER BY id LIMIT %s"
        query = f"SELECT id FROM {{documents}} WHERE {clause} {page}"
        return self._column(query, *values, after, after, limit)

    def delete(self, ids: Sequence[str]) -> int:
        """See `Store`."""
        with self._transaction(change=True) as (run, _):
            ((count, _),) = run(_REMOVE, list(ids))
        return int(count)

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """See `Store`."""
        query = "SELECT id, text, metadata, file FROM {documents} WHERE id = ANY(%s)"
        found = {
            name: Document(name, text, json.loads(metadata), file)
            for name, text, metadata, file in self._rows(query, list(ids))
        }
        return [found.get(name) for name in ids]

    def ids(self) -> Iterator[str]:
        """See `Store`."""
        return iter(self._column("SELECT id FROM {documents} ORDER BY number"))

    def search(self, request: SearchRequest) -> list[list[SearchResult]]:
        """See `Store`. A function as the filter is a TypeError."""
        texts, vectors = request.texts, request.vectors
        within: _Clause = ("TRUE", [])
        if request.where is not None:
            clause, values = compile_filter(request.where)
            within = (f"document IN (SELECT number FROM {{documents}} WHERE {clause})", values)
        with self._transaction() as (run, state):
            if not state.count:
                return [[] for _ in texts]

            def best(part: str, depth: int) -> list[list[SearchResult]]:
                if part == "bm25":
                    return [_by_words(run, text, within, depth) for text in texts]
                assert vectors is not None
                check_dimension(vectors, state.dimension)
                return [self._near(run, vector, within, depth) for vector in vectors]

            def nearest(pairs: list[tuple[int, str]]) -> list[SearchResult]:
                assert vectors is not None
                rows_of = defaultdict[str, list[Any]](list)
                for row in run(_VECTORS_OF, [name for _, name in pairs]):
                    rows_of[row[0]].append(row)
                return [_best_of_each(rows_of[name], vectors[n])[0] for n, name in pairs]

            found = by_mode(request, best, nearest)
            return [_described(run, *each) for each in zip(texts, found, strict=True)]

    def _near(self, run: _Run, query: Vectors, within: _Clause, top_k: int) -> list[SearchResult]:
        """Find the nearest documents, complete beyond the rounding of pgvector."""
        (clause, values), limit = within, top_k + _MORE
        while True:
            statement = _NEAREST.replace("<where>", clause)
            rows = run(statement, str(query.tolist()), *values, limit).fetchall()
            best = _best_of_each(rows, query)
            is_complete = len(rows) < limit
            if len(best) >= top_k and not is_complete:
                is_complete = -rows[-1][-1] < best[top_k - 1].score - rounding(len(query))
            if is_complete:
                return best[:top_k]
            limit *= 4

    @contextlib.contextmanager
    def _transaction(self, *, change: bool = False) -> Iterator[tuple[_Run, Manifest]]:
        """Begin a transaction that sees one state, or that alone changes the index."""
        with self._errors():
            self.ensure_open()
            self._pool.open()  # A forked child does so at its first query.
            with self._pool.connection() as connection:
                level = IsolationLevel.READ_COMMITTED if change else IsolationLevel.REPEATABLE_READ
                connection.isolation_level, connection.read_only = level, not change
                run, limit = _Run(connection, self._names), str(int(1000 * self.timeout_s))
                run(_TIMEOUTS, limit, "0" if change else limit)
                row = run(_READ + (" FOR UPDATE" if change else "")).fetchone()
                if row is None or row[0] != _VERSION:
                    raise IndexVersionError(
                        f"{self.url} has the version {row and row[0]}, but this program reads "
                        f"{_VERSION}; use another version of rag_demo, or name another table"
                    )
                version, made_by, dimension, source, finished, count, number = row
                model: Any = ModelIdentity(**json.loads(made_by)) if made_by and count else None
                refuse_other_model(model, self._identity, f" in '{self.url}'")
                yield run, Manifest(
                    model, source, finished, dimension, count=count, next_number=number,
                    commit=f"{number} {count}", version=version,
                )  # fmt: skip

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of psycopg into one line. None of them has the password."""
        try:
            yield
        except (errors.UndefinedTable, errors.UndefinedColumn, errors.DuplicateTable):
            raise IndexFileError(
                f"{self.url} holds no index, or tables of something else; make an index with: "
                "rag-demo index SOURCE --out URL, or name another table"
            ) from None
        except (psycopg.DataError, UnicodeEncodeError) as error:
            raise InvalidValueError(
                "Postgres knows no NUL, no lone surrogate and no infinity: "
                f"{on_one_line(error)}; remove it, or use an index in a folder"
            ) from None
        except errors.ProgramLimitExceeded as error:
            raise InvalidValueError(
                "Postgres takes ids, paths and words of about 2,700 bytes, and vectors of 16,000 "
                f"dimensions ({on_one_line(error)}); use less, or an index in a folder"
            ) from None
        except errors.InsufficientPrivilege as error:
            raise PostgresError(
                f"the user of {self.url} lacks a right: {on_one_line(error)}; grant it"
            ) from None
        except psycopg.OperationalError as error:
            raise PostgresError(
                f"{self.url} cannot answer now: {on_one_line(error)}; try again"
            ) from None
        except psycopg.Error as error:
            raise PostgresError(f"{self.url} refused this: {on_one_line(error)}") from None


def _by_words(run: _Run, text: str, within: _Clause, top_k: int) -> list[SearchResult]:
    words, (clause, values) = query_terms(text, _LANGUAGE), within
    parameters = [list(words), list(words.values()), *values, top_k, top_k]
    rows = run(_WORDS.replace("<where>", clause), *parameters)
    return [
        SearchResult(0, float(score), name, "", scores={"bm25": float(score)})
        for name, score in rows
    ]


def _best_of_each(rows: Sequence[Any], query: Vectors) -> list[SearchResult]:
    """Score rows exactly, and keep the best row of each document, the best documents first."""
    raw = np.frombuffer(b"".join(row[3][4:] for row in rows), ">f4")
    vectors, places = raw.astype(np.float32).reshape(len(rows), len(query)), np.arange(len(rows))
    scores = exact_scores(vectors.__getitem__, query[None], np.zeros_like(places), places).tolist()
    best: dict[str, SearchResult] = {}
    for place in sorted(places.tolist(), key=lambda place: (-scores[place], rows[place][0])):
        (name, start, stop, *_), score = rows[place], scores[place]
        hit = SearchResult(0, score, name, "", passage=(start, stop), scores={"dense": score})
        best.setdefault(name, hit)
    return list(best.values())


def _described(run: _Run, query: str, hits: Sequence[SearchResult]) -> list[SearchResult]:
    """Return results with rank, text, metadata and passage."""
    known = {name: parts for name, *parts in run(_DESCRIBE, [hit.id for hit in hits])}
    results = []
    for rank, hit in enumerate(hits, start=1):
        text, metadata, spans = known[hit.id]
        found = hit.passage or best_span(query, text, spans, _LANGUAGE)
        passage = found if found and found[1] else None
        results.append(
            hit._replace(rank=rank, text=text, metadata=json.loads(metadata), passage=passage)
        )
    return results

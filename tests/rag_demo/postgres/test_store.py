"""What the contract does not ask: exactness beside indexes, filters, faults, several writers."""

import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: see CONTRIBUTING.md")
from rag_demo import ModelMismatchError, PgVectorRetriever, PyTorchGPURetriever, RagDemoError
from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.programs import IMPORT_PATH
from tests.support.small_collections import Hashed, text_of
from tests.support.waiting import wait_for


def ids_of(results: Any) -> list[str]:
    return [each.id for each in results]


def at_once(function: Any, count: int) -> None:
    """Call a function with 0, 1, ... in threads at the same time; raise the first error."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(function, range(count)))


def test_answers_equal_those_of_other_retrievers_beside_a_poor_index(
    server: PostgresServer, table: str
) -> None:
    """Equal vectors, and vectors that differ in the last bits."""
    chance = np.random.default_rng(4)
    vectors = chance.standard_normal((3_000, 24)).astype(np.float32)
    vectors[1_000:1_040] = vectors[0]
    vectors[1_040:1_400] = vectors[0] * (1 + chance.integers(-3, 4, (360, 24)) * 2.0**-24)
    texts = [f"{text_of(n)} unique{n}" for n in range(3_000)]
    names = [f"n{n}" for n in chance.permutation(3_000)]
    queries = np.concatenate([vectors[:1], chance.standard_normal((3, 24))]).astype(np.float32)
    with (
        PgVectorRetriever(Hashed(), server.url, table) as retriever,
        PyTorchGPURetriever(Hashed(), device="cpu") as local,
    ):
        for each in (retriever, local):
            each.add(texts, ids=names, vectors=vectors)
        server.execute(f'ALTER TABLE "{table}_vectors" ALTER embedding TYPE vector(24)')
        method = "hnsw (embedding vector_ip_ops) WITH (m = 2, ef_construction = 4)"
        server.execute(f'CREATE INDEX ON "{table}_vectors" USING {method}')
        server.execute(f'ANALYZE "{table}_vectors"')
        for vector in queries:
            wanted = local.search(None, 9, vector=vector)
            assert retriever.search(None, 9, vector=vector) == wanted
        assert retriever.search("unique77 golf", 1, mode="bm25")[0].text.endswith("unique77")


VALUES = [
    0,
    1.0,
    True,
    None,
    "",
    "a",
    "ab",
    "1",
    2**53 + 1,
    float(2**53),
    2**70,
    0.1,
    [],
    [True],
    ["a", [1]],
    {"a": 1},
    {"a": {"b": None}},
    "'; DROP TABLE x; --",
    '%s {} $wanted @.key \\ "',
    "\U0001f600",
    "\uffff",
]


def test_filters_hold_for_the_same_documents_as_in_a_folder(
    server: PostgresServer, table: str
) -> None:
    metadata: list[dict[str, Any]] = [{"k": value, "n": n} for n, value in enumerate(VALUES)]
    metadata += [{}, {"other": 1}, {"k'\"%s{}": 1, "n": -1}]
    filters: list[dict[str, Any]] = [
        {"k": {name: value}}
        for value in VALUES
        for name in ("$eq", "$ne", "$contains", "$gt", "$gte", "$lt", "$lte")
        if isinstance(value, (int, float, str)) or name in ("$eq", "$ne", "$contains")
    ]
    filters += [{"$not": each} for each in filters]
    filters += [
        {"k": {"$in": []}},
        {"k": {"$nin": []}},
        {"k": {"$in": [1, "a", float("nan")]}},
        {"k": {"$nin": [1, "a", None, [1]]}},
        {"k": float("nan")},
        {"k": {"$ne": float("nan")}},
        {"k'\"%s{}": 1},
        {"$or": [{"n": {"$lt": 3}}, {"k": "a"}]},
        {},
    ]
    with (
        PgVectorRetriever(Hashed(), server.url, table) as retriever,
        PyTorchGPURetriever(Hashed(), device="cpu") as local,
    ):
        for each in (retriever, local):
            each.add(["text"] * len(metadata), metadata, [f"d{n}" for n in range(len(metadata))])
        for where in filters:
            found, wanted = (
                ids_of(each.search("text", 1_000, where=where, mode="dense"))
                for each in (retriever, local)
            )
            assert found == wanted, where
        with pytest.raises(TypeError, match="mapping"):
            retriever.search("text", where=lambda metadata: True)
        for where in ({"a\0": 1}, {"a": "\0"}, {"a": {"$contains": "\ud800"}}, {"a": math.inf}):
            with pytest.raises(ValueError, match="no NUL, no lone surrogate and no infinity"):
                retriever.search("text", where=where)


def test_what_is_not_ours_is_refused_and_stays(server: PostgresServer, table: str) -> None:
    server.execute(f'CREATE TABLE "{table}_documents" (important text)')
    with pytest.raises(RagDemoError, match="something else"):
        PgVectorRetriever(Hashed(), server.url, table)
    query = "SELECT tablename FROM pg_tables WHERE starts_with(tablename, %s)"
    assert server.execute(query, table) == [(f"{table}_documents",)]
    other = Hashed()
    other.name = "another"
    with PgVectorRetriever(Hashed(), server.url, f"{table}x") as retriever:
        retriever.add(["text"])
        with pytest.raises(ModelMismatchError, match="another"):
            PgVectorRetriever(other, server.url, f"{table}x")
        server.execute(f'UPDATE "{table}x_manifest" SET version = 99')
        with pytest.raises(RagDemoError, match="version 99"):
            retriever.search("text")


def test_many_writers_lose_no_update_and_do_not_deadlock(
    server: PostgresServer, table: str
) -> None:
    def write(number: int) -> None:
        with PgVectorRetriever(Hashed(), server.url, table) as retriever:
            for turn in range(8):
                shared = [f"s{n}" for n in range(10)][:: 1 if number % 2 else -1]
                retriever.add([f"writer {number} in {turn}"] * 10, ids=shared)
                retriever.add(["own"], ids=[f"w{number}-{turn}"])
                retriever.delete([f"w{number}-{turn - 1}"])

    at_once(write, 4)
    with PgVectorRetriever(Hashed(), server.url, table) as retriever:
        assert {*retriever.ids()} == {f"s{n}" for n in range(10)} | {f"w{n}-7" for n in range(4)}
        shared = retriever.get([f"s{n}" for n in range(10)])
        assert len({each.text for each in shared if each}) == 1  # One change, not parts of two.
        assert len(retriever.search("own writer", 99, mode="bm25")) == 14


def test_first_programs_of_a_new_database_create_their_tables(
    server: PostgresServer, table: str
) -> None:
    """Each another index: the extension belongs to the database."""
    server.execute(f"CREATE DATABASE {table}")
    url = server.url.replace("/postgres", f"/{table}")
    at_once(lambda number: PgVectorRetriever(Hashed(), url, f"t{number}").close(), 8)


def test_what_can_never_work_is_not_called_an_outage(server: PostgresServer, table: str) -> None:
    noise = "".join(map(chr, np.random.default_rng(1).integers(33, 0x3000, 4_000).tolist()))
    with PgVectorRetriever(Hashed(), server.url, table) as retriever:
        for match, change in (
            ("ids, paths and words of about 2,700", lambda: retriever.add(["a"], ids=[noise])),
            ("16,000 dimensions", lambda: retriever.add(["a"], vectors=np.ones((1, 16_001)))),
        ):
            with pytest.raises(RagDemoError, match=rf"^(?!.*try again).*{match}"):
                change()
        assert len(retriever) == 0
    server.execute(f"CREATE ROLE {table} LOGIN PASSWORD '{PASSWORD}'")
    with pytest.raises(RagDemoError, match=r"lacks a right: permission denied .*; grant it"):
        PgVectorRetriever(Hashed(), server.url.replace("tester", table), "another")


def test_exhausted_pool_and_long_locks_end_in_one_line(server: PostgresServer, table: str) -> None:
    import psycopg

    with PgVectorRetriever(Hashed(), server.url, table, pool_size=1, timeout_s=1) as retriever:
        retriever.add(["text"], ids=["a"])

        def fail(use: Any) -> None:
            with pytest.raises(RagDemoError, match=r"timeout|1\.00 sec") as caught:
                use()
            assert "\n" not in str(caught.value)

        with psycopg.connect(server.url) as other:
            other.execute(f'LOCK TABLE "{table}_vectors"')
            fail(lambda: retriever.search("text"))
            fail(lambda: retriever.add(["b"]))
            at_once(lambda _: fail(lambda: retriever.search("text")), 2)  # One has no connection.
        at_once(lambda _: retriever.search("text"), 8)
        assert ids_of(retriever.search("text")) == ["a"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://tester:wr0ng-pass@127.0.0.1:{port}/postgres",
        "postgresql://tester:wr0ng-pass@127.0.0.1:1/postgres",
        "postgresql://tester:wr0ng-pass%@127.0.0.1:{port}/postgres",
        "postgresql://tester:an@wr0ng-pass@127.0.0.1:{port}/postgres",
        "host=127.0.0.1 password=wr0ng-pass user",
        "postgresql://tester:wr0ng-pass@127.0.0.1:{port}/postgres?unknown=option",
        "postgresql://tester:wr0ng-pass@127.0.0.1:{port}/postgres?table=x;DROP",
    ],
)
def test_errors_are_one_line_without_the_password(server: PostgresServer, url: str) -> None:
    with pytest.raises(RagDemoError) as caught:
        PgVectorRetriever(Hashed(), url.format(port=server.port))
    assert "wr0ng" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)


def test_closed_retriever_leaves_no_connection_and_no_thread(
    server: PostgresServer, table: str
) -> None:
    before = {*threading.enumerate()}
    retriever = PgVectorRetriever(Hashed(), server.url, table)
    retriever.add(["text"])
    retriever.close()
    assert {*threading.enumerate()} <= before
    query = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    wait_for(lambda: server.execute(query) == [(1,)])  # its own


EXITS = """
import os, sys
from rag_demo import PgVectorRetriever
from tests.support.small_collections import Hashed
retriever = PgVectorRetriever(Hashed(), sys.argv[1], sys.argv[2])
retriever.add(["of the parent"], ids=["parent"])
pid = os.fork()
if not pid:
    retriever.add(["of the child"], ids=["child"])
    assert {each.id for each in retriever.search("of")} == {"parent", "child"}
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert set(retriever.ids()) == {"parent", "child"}
raise SystemExit(3)
"""


def test_program_and_its_forked_child_leave_cleanly(
    server: PostgresServer, table: str, clean_exit: Any
) -> None:
    command = [sys.executable, "-W", "error", "-c", EXITS, server.url, table]
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    options = {"timeout_s": 100, "max_shutdown_s": 100, "env": environment}
    assert clean_exit(command, returncode=3, **options).stderr == ""

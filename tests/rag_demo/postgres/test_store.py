"""What the contract does not ask: exactness beside indexes, filters, faults, several writers."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: see make test-postgres")
from rag_demo import ModelMismatchError, PgVectorRetriever, PyTorchGPURetriever, RagDemoError
from tests.support.clean_exit import check
from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.programs import IMPORT_PATH
from tests.support.small_collections import Hashed, text_of
from torch_utils import ResourceClosedError

MODES = ("dense", "bm25", "hybrid")


def ids_of(results: Any) -> list[str]:
    return [each.id for each in results]


@pytest.mark.parametrize("mode", ["dense", "hybrid"])
def test_answers_equal_those_of_other_retrievers_beside_a_poor_index(
    server: PostgresServer, table: str, mode: str
) -> None:
    """Whole passages, equal vectors, and vectors that differ in the last bits."""
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
        for vector in queries:
            exact = local.search(None, 9, vector=vector)
            assert retriever.search(None, 9, vector=vector) == exact
        server.execute(
            f'CREATE INDEX ON "{table}_vectors" USING hnsw ((embedding::vector(24)) '
            "vector_ip_ops) WITH (m = 2, ef_construction = 4)"
        )
        server.execute(f'ALTER TABLE "{table}_vectors" ALTER embedding TYPE vector(24)')
        server.execute(
            f'CREATE INDEX ON "{table}_vectors" USING hnsw (embedding vector_ip_ops) '
            "WITH (m = 2, ef_construction = 4)"
        )
        server.execute(f'ANALYZE "{table}_vectors"')
        for _ in range(7):  # A statement that is prepared after some uses is the same.
            for vector in queries:
                wanted = local.search(None, 9, vector=vector)
                assert retriever.search(None, 9, vector=vector) == wanted
        if mode == "hybrid":
            words = retriever.search("unique77 golf", 1, mode="bm25")
            assert words[0].text.endswith("unique77")


def test_hnsw_and_binary_return_as_many_as_match_a_filter(
    server: PostgresServer, table: str
) -> None:
    chance = np.random.default_rng(5)
    vectors = chance.standard_normal((4_000, 32)).astype(np.float32)
    rare = [{"rare": n % 500 == 0} for n in range(4_000)]
    with PgVectorRetriever(Hashed(), server.url, table) as exact:
        exact.add(["text"] * 4_000, rare, [f"n{n:04}" for n in range(4_000)], vectors=vectors)
        for kind in ("binary", "hnsw"):
            with PgVectorRetriever(Hashed(), server.url, table, approximate=kind) as retriever:
                retriever.build_index()
                found = hits = 0
                for vector in chance.standard_normal((20, 32)).astype(np.float32):
                    wanted = exact.search(None, 10, vector=vector)
                    found += len(
                        {*ids_of(wanted)} & {*ids_of(retriever.search(None, 10, vector=vector))}
                    )
                    matching = retriever.search(None, 8, vector=vector, where={"rare": True})
                    hits += ids_of(matching) == ids_of(
                        exact.search(None, 8, vector=vector, where={"rare": True})
                    )
                assert hits == 20
                assert found >= 140
    plan = server.execute(
        f'EXPLAIN SELECT * FROM "{table}_vectors" ORDER BY embedding::vector(32) <#> '
        f"'{[0.5] * 32}'::vector(32) LIMIT 3"
    )
    assert "hnsw" in str(plan)


VALUES = [
    0, 1, 1.0, True, False, None, "", "a", "b", "ab", "\u00e9", "\U0001f600", "1", "true", 2**53,
    2**53 + 1, float(2**53), 2**60, 2**70, -1, -0.0, 0.1, 1e300, [], [1],
    [1.0], [True], ["a", [1]], {}, {"a": 1}, {"a": 1.0}, {"a": {"b": None}}, "'; DROP TABLE x; --",
    "%s {} $wanted @.key \\ \"", "Z", "\uffff", "\ufe00",
]  # fmt: skip


def test_filters_hold_for_the_same_documents_as_in_a_folder(
    server: PostgresServer, table: str
) -> None:
    metadata: list[dict[str, Any]] = [{"k": value, "n": n} for n, value in enumerate(VALUES)]
    metadata += [{}, {"other": 1}, {"k'\"%s{}": 1, "n": -1}]
    filters: list[dict[str, Any]] = []
    for value in VALUES:
        names = ["$eq", "$ne", "$contains"]
        if isinstance(value, (int, float, str)):
            names += ["$gt", "$gte", "$lt", "$lte"]
        filters += [{"k": {name: value}} for name in names]
    filters += [{"$not": each} for each in filters]
    filters += [
        {"k": {"$in": []}}, {"k": {"$nin": []}}, {"k": {"$in": [1, "a", float("nan")]}},
        {"k": {"$nin": [1, "a", None, [1]]}}, {"k": float("nan")}, {"k": {"$ne": float("nan")}},
        {"k'\"%s{}": 1}, {"$or": [{"n": {"$lt": 3}}, {"k": "a"}]}, {},
        {"$and": [{"k": {"$gte": 0}}, {"$not": {"n": {"$in": [0, 1, 2]}}}]},
    ]  # fmt: skip
    with (
        PgVectorRetriever(Hashed(), server.url, table) as retriever,
        PyTorchGPURetriever(Hashed(), device="cpu") as local,
    ):
        for each in (retriever, local):
            each.add(["text"] * len(metadata), metadata, [f"d{n}" for n in range(len(metadata))])
        for where in filters:
            wanted = ids_of(local.search("text", 1_000, where=where, mode="dense"))
            assert ids_of(retriever.search("text", 1_000, where=where, mode="dense")) == wanted, (
                where
            )
        with pytest.raises(TypeError, match="mapping"):
            retriever.search("text", where=lambda metadata: True)
        for where in ({"a\0": 1}, {"a": "\0"}, {"a": {"$contains": "\ud800"}}, {"a": math.inf}):
            with pytest.raises(ValueError, match="no NUL, no lone surrogate and no infinity"):
                retriever.search("text", where=where)


def test_no_string_is_read_as_sql(server: PostgresServer, table: str) -> None:
    attack = "x\"'; DROP TABLE notes; -- %s {vectors} $1"
    server.execute("CREATE TABLE IF NOT EXISTS notes (important text)")
    with pytest.raises(RagDemoError, match="letters"):
        PgVectorRetriever(Hashed(), server.url, attack)
    with PgVectorRetriever(Hashed(), server.url, table) as retriever:
        retriever.add([attack], [{attack: attack}], [attack])
        for mode in MODES:
            found = retriever.search(attack, where={attack: attack}, mode=mode)
            assert [(each.id, each.text, dict(each.metadata)) for each in found] == [
                (attack, attack, {attack: attack})
            ]
        assert retriever.get([attack]) != [None]
        assert retriever.delete([attack]) == 1
    assert server.execute("SELECT count(*) FROM notes") == [(0,)]


def test_what_is_not_ours_is_refused_and_stays(server: PostgresServer, table: str) -> None:
    for name in ("manifest", "documents"):
        server.execute(f'CREATE TABLE "{table}_{name}" (important text)')
        server.execute(f'INSERT INTO "{table}_{name}" VALUES (%s)', "yes")
        with pytest.raises(RagDemoError, match="something else"):
            PgVectorRetriever(Hashed(), server.url, table)
        assert server.execute(f'SELECT * FROM "{table}_{name}"') == [("yes",)]
        left = server.execute(
            "SELECT tablename FROM pg_tables WHERE starts_with(tablename, %s)", table
        )
        assert left == [(f"{table}_{name}",)]
        server.execute(f'DROP TABLE "{table}_{name}"')


def test_other_version_and_other_model_are_refused(server: PostgresServer, table: str) -> None:
    other = Hashed()
    other.name = "another"
    with PgVectorRetriever(Hashed(), server.url, table) as retriever:
        retriever.add(["text"])
        with pytest.raises(ModelMismatchError, match="another"):
            PgVectorRetriever(other, server.url, table)
        assert len(retriever) == 1
        server.execute(f'UPDATE "{table}_manifest" SET version = 99')
        with pytest.raises(RagDemoError, match="version 99"):
            retriever.search("text")
        with pytest.raises(RagDemoError, match="version 99"):
            PgVectorRetriever(Hashed(), server.url, table)


def test_many_writers_lose_no_update_and_do_not_deadlock(
    server: PostgresServer, table: str
) -> None:
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with PgVectorRetriever(Hashed(), server.url, table) as retriever:
                for turn in range(8):
                    shared = [f"s{n}" for n in range(10)][:: 1 if number % 2 else -1]
                    retriever.add([f"by {number} in {turn}"] * 10, ids=shared)
                    retriever.add(["own"], ids=[f"w{number}-{turn}"])
                    retriever.delete([f"w{number}-{turn - 1}"])
        except BaseException as error:  # Shown by the test.
            failures.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with PgVectorRetriever(Hashed(), server.url, table) as retriever:
        assert {*retriever.ids()} == {f"s{n}" for n in range(10)} | {f"w{n}-7" for n in range(4)}
        assert len(retriever) == 14
        shared = retriever.get([f"s{n}" for n in range(10)])
        assert len({each.text for each in shared if each}) == 1  # One change, not parts of two.
    (counts,) = server.execute(
        f'SELECT (SELECT count(*) FROM "{table}_vectors"), (SELECT count(*) FROM "{table}_bits"),'
        f' (SELECT count(DISTINCT document) FROM "{table}_postings"),'
        f' (SELECT words FROM "{table}_manifest") - (SELECT sum(words) FROM "{table}_documents")'
    )
    assert counts == (14, 14, 14, 0)


def test_first_programs_of_a_new_database_create_their_tables(
    server: PostgresServer, table: str
) -> None:
    """Each another index: the extension belongs to the database."""
    server.execute(f"CREATE DATABASE {table}")
    url = server.url.replace("/postgres", f"/{table}")
    failed: list[Exception] = []

    def open_one(number: int) -> None:
        try:
            PgVectorRetriever(Hashed(), url, f"t{number}").close()
        except RagDemoError as error:
            failed.append(error)

    threads = [threading.Thread(target=open_one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_what_can_never_work_is_not_called_an_outage(server: PostgresServer, table: str) -> None:
    noise = "".join(map(chr, np.random.default_rng(1).integers(33, 0x3000, 4_000).tolist()))
    with PgVectorRetriever(Hashed(), server.url, table, approximate="hnsw") as retriever:
        for match, change in (
            ("an id, a path or a word is too long", lambda: retriever.add(["a"], ids=[noise])),
            ("16,000 dimensions", lambda: retriever.add(["a"], vectors=np.ones((1, 16_001)))),
        ):
            with pytest.raises(RagDemoError, match=match) as caught:
                change()
            assert "try again" not in str(caught.value)
            assert len(retriever) == 0
        retriever.add(["a"], vectors=np.ones((1, 2_001)))
        with pytest.raises(RagDemoError, match="2,000 dimensions"):
            retriever.build_index()
    server.execute(f"CREATE ROLE {table} LOGIN PASSWORD '{PASSWORD}'")
    with pytest.raises(RagDemoError, match=r"lacks a right: permission denied .*; grant it"):
        PgVectorRetriever(Hashed(), server.url.replace("tester", table), "another")


def test_restarted_server_gives_an_error_and_then_works(table: str) -> None:
    own = PostgresServer()
    try:
        with PgVectorRetriever(Hashed(), own.url, table, timeout_s=2) as retriever:
            retriever.add(["before the restart"], ids=["old"])
            own.stop(signal.SIGQUIT)
            started_s = time.monotonic()
            with pytest.raises(RagDemoError) as caught:
                retriever.search("restart")
            assert time.monotonic() - started_s < 10
            assert "\n" not in str(caught.value)
            assert PASSWORD not in str(caught.value)
            own.start()
            retriever.add(["after the restart"], ids=["new"])
            assert {*ids_of(retriever.search("restart"))} == {"old", "new"}
    finally:
        own.close()


def test_exhausted_pool_and_long_locks_end_in_one_line(server: PostgresServer, table: str) -> None:
    import psycopg

    with PgVectorRetriever(Hashed(), server.url, table, pool_size=1, timeout_s=1) as retriever:
        retriever.add(["text"], ids=["a"])
        with psycopg.connect(server.url) as other:
            other.execute(f'LOCK TABLE "{table}_vectors"')
            for use in (lambda: retriever.search("text"), lambda: retriever.add(["b"])):
                with pytest.raises(RagDemoError, match="timeout") as caught:
                    use()
                assert "\n" not in str(caught.value)

            def wait() -> None:
                with pytest.raises(RagDemoError):
                    retriever.search("text")

            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(0.3)
            with pytest.raises(RagDemoError, match=r"timeout|1\.00 sec"):
                retriever.stats()
            waiting.join()
        assert ids_of(retriever.search("text")) == ["a"]
        threads = [threading.Thread(target=retriever.search, args=("text",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (count,) = server.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s", f"%{table}%"
        )
        assert count[0] <= 2


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://tester:wr0ng-pass@127.0.0.1:{port}/postgres",
        "postgresql://tester:wr0ng-pass@127.0.0.1:{port}/missing",
        "postgresql://tester:wr0ng-pass@127.0.0.1:1/postgres",
        "postgresql://tester:wr0ng-pass@127.0.0.1:port/postgres",
        "postgresql://tester:wr0ng-pass%@127.0.0.1:{port}/postgres",
        "postgresql://tester:an@wr0ng-pass@127.0.0.1:{port}/postgres",
        "postgresql://tester:wr0ng-pass@[127.0.0.1:{port}/postgres",
        "host=127.0.0.1 password=wr0ng-pass user",
        "postgresql://tester:wr0ng-pass@127.0.0.1:{port}/postgres?unknown=option",
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
    with pytest.raises(ResourceClosedError):
        retriever.store.count
    assert {*threading.enumerate()} <= before
    query = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    deadline_s = time.monotonic() + 10
    while server.execute(query) != [(1,)]:  # its own
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


EXITS = """
import os, sys
from rag_demo import PgVectorRetriever
from tests.support.small_collections import Hashed

retriever = PgVectorRetriever(Hashed(), sys.argv[1], sys.argv[2])
retriever.add(["of the parent"], ids=["parent"])
if sys.argv[3] == "fork":
    pid = os.fork()
    if not pid:
        retriever.add(["of the child"], ids=["child"])
        assert {each.id for each in retriever.search("of")} == {"parent", "child"}
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert set(retriever.ids()) == {"parent", "child"}
    retriever.delete(["child"])
if sys.argv[3] == "error":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["fork", "end", "error"])
def test_program_leaves_cleanly(server: PostgresServer, table: str, how: str) -> None:
    command = [sys.executable, "-W", "error", "-c", EXITS, server.url, table, how]
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    report = check(command, timeout_s=100, max_shutdown_s=100, env=environment)
    assert report.clean, f"{report}\n{report.stderr}"
    assert (report.returncode, report.stderr) == (3 if how == "error" else 0, "")

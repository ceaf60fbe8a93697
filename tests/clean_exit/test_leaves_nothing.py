"""``leaves_nothing``: a test that leaves threads, tasks or processes fails, and others do not."""

import re
import textwrap
from pathlib import Path

import pytest

HEAD = """
import asyncio, concurrent.futures, multiprocessing, os, subprocess, sys, threading, time
import pytest
kept = []
never = threading.Event()
"""
# What tests leave, and a part of the message; the line that made it has "# here".
LEFT = {
    "thread": (
        """
        def test_it(): threading.Thread(target=never.wait, daemon=True, name="lone").start()  # here
        """,
        "thread 'lone', started in",
    ),
    "thread of a fixture": (
        """
        @pytest.fixture
        def started():
            threading.Thread(target=never.wait, daemon=True, name="lone").start()  # here
        def test_it(started): pass
        """,
        "thread 'lone', started in",
    ),
    "thread of a thread": (
        """
        def outer(): threading.Thread(target=never.wait, daemon=True, name="inner").start()  # here
        def test_it():
            one = threading.Thread(target=outer)
            one.start()
            one.join()
        """,
        "thread 'inner', started in",
    ),
    "executor": (
        """
        def test_it():
            kept.append(concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pool"))
            kept[0].submit(int).result()  # here
        """,
        "thread 'pool_0', started in",
    ),
    "task of a loop that is closed": (
        """
        def test_it():
            async def main(): asyncio.create_task(asyncio.sleep(999), name="late")  # here
            loop = asyncio.new_event_loop()
            loop.run_until_complete(main())
            loop.close()
        """,
        "task 'late' of sleep(), created in",
    ),
    "task of a loop that goes on": (
        """
        @pytest.fixture(scope="module")
        def loop():
            loop = asyncio.new_event_loop()
            yield loop
            asyncio.set_event_loop(None)
            for task in asyncio.all_tasks(loop): task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        def test_it(loop):
            async def main(): asyncio.create_task(asyncio.sleep(999), name="late")  # here
            loop.run_until_complete(main())
        """,
        "task 'late' of sleep(), created in",
    ),
    "process": (
        """
        @pytest.fixture(scope="module", autouse=True)
        def ended():
            yield
            kept[0].kill()
            kept[0].wait()
        def test_it(): kept.append(subprocess.Popen(["sleep", "999"]))  # here
        """,
        "sleep 999, started in",
    ),
    "process of multiprocessing": (
        """
        @pytest.fixture(scope="module", autouse=True)
        def ended():
            yield
            kept[0].kill()
            kept[0].join()
        def test_it():
            kept.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,)))
            kept[0].start()  # here
        """,
        "started in",
    ),
    "forked process": (
        """
        @pytest.fixture(scope="module", autouse=True)
        def ended():
            yield
            os.kill(kept[0], 9)
            os.waitpid(kept[0], 0)
        def test_it():
            kept.append(os.fork())
            if not kept[0]:
                time.sleep(999)
                os._exit(0)
        """,
        "started in an unknown place",
    ),
    "in unittest": (
        """
        import unittest
        class Case(unittest.TestCase):
            def test_it(self):
                threading.Thread(target=never.wait, daemon=True, name="lone").start()  # here
        """,
        "thread 'lone', started in",
    ),
}
CLEAN = {
    "all is ended": """
        def test_it():
            one = threading.Thread(target=int)
            one.start()
            with concurrent.futures.ThreadPoolExecutor() as pool: pool.submit(int).result()
            subprocess.run(["true"])
            async def main(): asyncio.create_task(asyncio.sleep(999))
            asyncio.run(main())  # It cancels the task.
            one.join()
    """,
    "the fixture of the test ends it": """
        @pytest.fixture
        def started():
            stop = threading.Event()
            one = threading.Thread(target=stop.wait)
            one.start()
            process = subprocess.Popen(["sleep", "999"])
            yield
            stop.set()
            process.kill()
            process.wait()
        def test_it(started): pass
    """,
    "a dropped executor": """
        def test_it():
            pool = concurrent.futures.ThreadPoolExecutor()
            pool.submit(int).result()
            cycle = [pool]
            cycle.append(cycle)
    """,
    "fixtures of wider scopes": """
        import socketserver, http.server, urllib.request
        @pytest.fixture(scope="session", autouse=True)
        def pools():
            threads = concurrent.futures.ThreadPoolExecutor(2)
            processes = concurrent.futures.ProcessPoolExecutor(1)
            yield threads, processes
            threads.shutdown()
            processes.shutdown()
        @pytest.fixture(scope="module")
        def server():
            class Handler(http.server.BaseHTTPRequestHandler):
                protocol_version = "HTTP/1.1"  # Its thread stays with the connection.
                def do_GET(self):
                    self.send_response(204)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                def log_message(self, *words): pass
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            server.daemon_threads = True
            one = threading.Thread(target=server.serve_forever)
            one.start()
            process = subprocess.Popen(["sleep", "999"])
            yield server.server_address
            process.kill()
            process.wait()
            server.shutdown()
            one.join()
        @pytest.fixture(scope="class")
        def nested(request):
            threading.Thread(target=never.wait, daemon=True).start()
            request.getfixturevalue("server")
            threading.Thread(target=never.wait, daemon=True).start()
        @pytest.mark.parametrize("n", range(3))
        def test_it(pools, server, nested, n):
            threads, processes = pools
            assert list(threads.map(abs, [n, n])) == [n, n]
            assert processes.submit(abs, n).result() == n
            import http.client
            kept.append(http.client.HTTPConnection(*server))
            kept[-1].request("GET", "/")
            assert kept[-1].getresponse().status == 204
    """,
    "a loop of a wider scope with its server": """
        @pytest.fixture(scope="module")
        def loop():
            loop = asyncio.new_event_loop()
            yield loop
            for task in asyncio.all_tasks(loop): task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
        @pytest.fixture(scope="module")
        def port(loop):
            async def serve(reader, writer):
                writer.write(await reader.readline())
                await asyncio.sleep(999)  # The connection stays.
            server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
            return server.sockets[0].getsockname()[1]
        @pytest.mark.parametrize("n", range(2))
        def test_it(loop, port, n):
            async def ask():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                kept.append(writer)
                writer.write(b"hello" + bytes([10]))
                assert await reader.readline() == b"hello" + bytes([10])
                assert await asyncio.to_thread(abs, -1) == 1
            loop.run_until_complete(ask())
    """,
    "a dropped asynchronous generator, and a clock that is replaced": """
        import unittest.mock
        @pytest.fixture(scope="module", autouse=True)
        def still():
            with unittest.mock.patch("time.sleep", side_effect=AssertionError): yield
        @pytest.fixture(scope="module")
        def loop():
            loop = asyncio.new_event_loop()
            yield loop
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        def test_it(loop):
            async def numbers():
                try:
                    yield 1
                    yield 2
                finally:
                    await asyncio.sleep(0)
            async def first():
                async for n in numbers(): return n
            assert loop.run_until_complete(first()) == 1
            threading.Thread(target=never.wait, args=(0.3,)).start()
    """,
    "helpers of multiprocessing": """
        from multiprocessing import shared_memory
        def test_it():
            block = shared_memory.SharedMemory(create=True, size=1)
            block.close()
            block.unlink()
            context = multiprocessing.get_context("forkserver")
            one = context.Process(target=int)
            one.start()
            one.join()
    """,
    "a test that fails, and one that is skipped": """
        @pytest.mark.xfail(strict=True)
        def test_it():
            pool = concurrent.futures.ThreadPoolExecutor()
            pool.submit(int).result()
            raise ValueError
        def test_that():
            threading.Thread(target=never.wait, daemon=True).start()
            pytest.skip()
    """,
}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    settings = "addopts = --strict-markers -p no:hypothesispytest -p no:anyio"
    pytester.makeini(f"[pytest]\nleaves_nothing = true\n{settings}\n")
    return pytester


def write(suite: pytest.Pytester, code: str) -> None:
    Path(suite.path, "test_it.py").write_text(HEAD + textwrap.dedent(code), encoding="utf-8")


COLLECTS = """
import gc, types
from clean_exit import leaves
leaves._POOLED = types.SimpleNamespace(match=lambda name: gc.collect() or True)
"""


def test_task_that_is_destroyed_during_the_check_is_found(suite: pytest.Pytester) -> None:
    """By a garbage collection between the looks at destroyed tasks and at those that are alive."""
    suite.makeconftest(COLLECTS)
    code, message = LEFT["task of a loop that is closed"]
    start = "    threading.Thread(target=time.sleep, args=[999], daemon=True).start()"
    write(suite, f"{textwrap.dedent(code).rstrip()}\n{start}\n")
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=1, errors=1)
    assert message in result.stdout.str()


@pytest.mark.parametrize("name", LEFT)
def test_what_a_test_leaves_fails_it(suite: pytest.Pytester, name: str) -> None:
    """The message has the name of what is left, and the line that has made it."""
    code, message = LEFT[name]
    write(suite, code)
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=1, errors=1)
    text = result.stdout.str()
    assert message in text
    lines = Path(suite.path, "test_it.py").read_text(encoding="utf-8").splitlines()
    if place := [number for number, line in enumerate(lines, 1) if line.endswith("# here")]:
        assert (
            f"started in test_it.py:{place[0]} " in text
            or f"created in test_it.py:{place[0]} " in text
        )
    named = {line for line in text.splitlines() if re.match("  (thread|task|process) ", line)}
    assert len(named) == 1, text


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_not_left_by_a_test_is_no_error(suite: pytest.Pytester, name: str) -> None:
    write(suite, CLEAN[name])
    result = suite.runpytest_subprocess()
    assert "errors" not in result.parseoutcomes(), result.stdout.str()
    assert "failed" not in result.parseoutcomes(), result.stdout.str()


MARKED = """
@pytest.mark.leaves_nothing
def test_marked(): threading.Thread(target=never.wait, daemon=True, name="one").start()

def test_not_marked(): threading.Thread(target=never.wait, daemon=True, name="two").start()

@pytest.mark.leaves_nothing(ignore="thread 'thr")
def test_ignored(): threading.Thread(target=never.wait, daemon=True, name="three").start()

@pytest.mark.leaves_nothing(ignore=[""])
def test_wrong_pattern(): pass

@pytest.mark.leaves_nothing(thread=False)
def test_wrong_option(): pass
"""


def test_marker_checks_one_test_and_takes_patterns(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\naddopts = --strict-markers -p no:hypothesispytest -p no:anyio\n")
    write(suite, MARKED)
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=5, errors=3)
    text = result.stdout.str()
    assert "thread 'one'" in text
    assert "thread 'two'" not in text
    assert "thread 'three'" not in text
    assert "the marker leaves_nothing: a regular expression must not be empty" in text
    assert "the marker leaves_nothing takes ignore= only" in text


def test_settings_take_patterns(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nleaves_nothing = true\nleaves_nothing_ignore =\n    thread 'lo+ne'\n")
    write(suite, LEFT["thread"][0])
    suite.runpytest_subprocess().assert_outcomes(passed=1)


def test_methods_are_given_back_at_the_end(suite: pytest.Pytester) -> None:
    write(suite, "def test_it(): assert threading.Thread.start.__wrapped__\n")
    code = """
        import pytest, threading, subprocess, asyncio
        before = threading.Thread.start, subprocess.Popen.__init__
        assert pytest.main(["-q", "test_it.py"]) == 0
        assert before == (threading.Thread.start, subprocess.Popen.__init__)
    """
    assert suite.runpython(suite.makepyfile(main=code)).ret == 0


def test_objects_of_the_code_live_no_longer_than_without_it(suite: pytest.Pytester) -> None:
    code = """
        import gc, logging, weakref
        ends = []
        def test_thread():
            one = threading.Thread(target=int)
            end = weakref.ref(one)
            one.start()
            one.join()
            del one
            assert end() is None
        def test_task():
            async def work(): return bytes(1000)
            async def main():
                task = asyncio.create_task(work())
                await task
                ends.append(weakref.ref(task))
            asyncio.run(main())
        def test_task_is_gone():
            gc.collect()
            assert ends[0]() is None
        def test_error_that_nobody_asks_for(caplog):
            async def fail(): raise ValueError
            async def main():
                asyncio.create_task(fail())
                await asyncio.sleep(0.01)
            asyncio.run(main())
            gc.collect()
            assert "never retrieved" in caplog.text
    """
    write(suite, code)
    suite.runpytest_subprocess().assert_outcomes(passed=4)


@pytest.mark.slow
def test_pool_that_replaces_its_workers_belongs_to_its_fixture(suite: pytest.Pytester) -> None:
    code = """
        @pytest.fixture(scope="module")
        def pool():
            with multiprocessing.Pool(2, maxtasksperchild=1) as pool: yield pool
        @pytest.mark.parametrize("n", range(30))
        def test_it(pool, n): assert pool.map(abs, range(6), chunksize=1) == [*range(6)]
    """
    write(suite, code)
    suite.runpytest_subprocess().assert_outcomes(passed=30)


@pytest.mark.slow
def test_workers_of_xdist_and_reruns_check_as_well(suite: pytest.Pytester) -> None:
    write(suite, LEFT["thread"][0])
    result = suite.runpytest_subprocess("-n", "1", "--reruns", "1", "-p", "no:cacheprovider")
    assert "thread 'lone', started in" in result.stdout.str()
    assert result.ret == 1

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

def new(name="lone"): return threading.Thread(target=never.wait, daemon=True, name=name)
"""
# What the comments name has to be found, with the place.
LEFT = """
    import unittest

    @pytest.fixture(scope="module")
    def ended():
        yield
        for pid in kept[-3].pid, kept[-2].pid, kept[-1]: os.kill(pid, 9)

    @pytest.fixture(scope="module")
    def loop():
        loop = asyncio.new_event_loop()
        yield loop
        for task in asyncio.all_tasks(loop): task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    @pytest.fixture
    def started(ended, loop): new("mine").start()  # thread 'mine'
    def outer(): new("inner").start()  # thread 'inner'
    def test_all(started, loop):
        one = threading.Thread(target=outer)
        one.start()
        one.join()
        kept.append(concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pool"))
        kept[0].submit(int).result()  # thread 'pool_0'
        async def late(): asyncio.create_task(asyncio.sleep(999), name="open")  # task 'open'
        loop.run_until_complete(late())
        async def lost(): asyncio.create_task(asyncio.sleep(999), name="closed")  # task 'closed'
        closed = asyncio.new_event_loop()
        closed.run_until_complete(lost())
        closed.close()
        kept.append(subprocess.Popen(["sleep", "999"]))  # sleep 999
        kept.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,)))
        kept[-1].start()  # process
        kept.append(os.fork())
        if not kept[-1]:
            time.sleep(999)
            os._exit(0)

    class Case(unittest.TestCase):
        def test_case(self): new("of-case").start()  # thread 'of-case'
    def test_ignored_by_the_setting(): new("tqdm_monitor").start()
"""
# By the name of their file.
CLEAN = {
    "ended": """
        def test_ended_in_the_test():
            with concurrent.futures.ThreadPoolExecutor() as pool: pool.submit(int).result()
            subprocess.run(["true"])
            async def main(): asyncio.create_task(asyncio.sleep(999))
            asyncio.run(main())  # It cancels the task.
        @pytest.fixture
        def started():
            stop = threading.Event()
            threading.Thread(target=stop.wait).start()
            process = subprocess.Popen(["sleep", "999"])
            yield
            stop.set()
            process.kill()
            process.wait()
        def test_ended_by_its_fixture(started): pass
        def test_dropped_executor():
            pool = concurrent.futures.ThreadPoolExecutor()
            pool.submit(int).result()
            cycle = [pool]
            cycle.append(cycle)
        def test_helpers_of_multiprocessing():
            from multiprocessing import shared_memory
            block = shared_memory.SharedMemory(create=True, size=1)
            block.close()
            block.unlink()
            with multiprocessing.get_context("forkserver").Pool(1): pass
        @pytest.mark.xfail(strict=True)
        def test_that_fails():
            new().start()
            raise ValueError
        def test_that_is_skipped():
            new().start()
            pytest.skip()
    """,
    "wider_scopes": """
        import socket, socketserver
        @pytest.fixture(scope="session", autouse=True)
        def pools():
            threads = concurrent.futures.ThreadPoolExecutor(2)
            processes = concurrent.futures.ProcessPoolExecutor(1)
            yield threads, processes
            threads.shutdown()
            processes.shutdown()
        @pytest.fixture(scope="module")
        def server():
            class Handler(socketserver.StreamRequestHandler):
                def handle(self):
                    self.wfile.write(self.rfile.readline())
                    never.wait()  # Its thread stays with the connection.
            server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever).start()
            process = subprocess.Popen(["sleep", "999"])
            yield server.server_address
            process.kill()
            process.wait()
            server.shutdown()
            server.server_close()
        @pytest.fixture(scope="class")
        def nested(request):
            new().start()
            request.getfixturevalue("server")
            new().start()
        @pytest.mark.parametrize("n", range(2))
        def test_it(pools, server, nested, n):
            threads, processes = pools
            assert list(threads.map(abs, [n, n])) == [n, n]
            assert processes.submit(abs, n).result() == n
            kept.append(socket.create_connection(server))
            kept[-1].sendall(bytes([10]))
            assert kept[-1].recv(9) == bytes([10])
    """,
    "loop_of_a_wider_scope": """
        import unittest.mock
        @pytest.fixture(scope="module")
        def loop():
            loop = asyncio.new_event_loop()
            yield loop
            for task in asyncio.all_tasks(loop): task.cancel()
            loop.run_until_complete(loop.shutdown_asyncgens())
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
        def test_server(loop, port, n):
            async def ask():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                kept.append(writer)
                writer.write(bytes([10]))
                assert await reader.readline() == bytes([10])
                assert await asyncio.to_thread(abs, -1) == 1
            loop.run_until_complete(ask())
        @pytest.fixture(scope="module")
        def clock():
            with unittest.mock.patch("time.sleep", side_effect=AssertionError): yield
        def test_dropped_generator_and_a_clock_that_is_replaced(loop, clock):
            async def numbers():
                try: yield 1
                finally: await asyncio.sleep(0)
            async def first():
                async for n in numbers(): return n
            assert loop.run_until_complete(first()) == 1
            threading.Thread(target=never.wait, args=(0.3,)).start()
    """,
    "objects_live_no_longer": """
        import gc, weakref
        ends = []
        def test_thread():
            one = threading.Thread(target=int)
            end = weakref.ref(one)
            one.start()
            one.join()
            del one
            assert end() is None
        def test_task():
            async def main():
                task = asyncio.create_task(asyncio.sleep(0))
                await task
                ends.append(weakref.ref(task))
            asyncio.run(main())
        def test_task_is_gone():
            gc.collect()
            assert ends[0]() is None
        def test_error_that_is_never_retrieved(caplog):
            async def fail(): raise ValueError
            async def main():
                asyncio.create_task(fail())
                await asyncio.sleep(0.01)
            asyncio.run(main())
            gc.collect()
            assert "never retrieved" in caplog.text
    """,
}
SETTINGS = "[pytest]\naddopts = --strict-markers -p no:hypothesispytest -p no:anyio\n"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini(f"{SETTINGS}leaves_nothing = true\nleaves_nothing_ignore = tq.m\n")
    return pytester


def write(suite: pytest.Pytester, code: str, name: str = "it") -> None:
    text = HEAD + textwrap.dedent(code)
    Path(suite.path, f"test_{name}.py").write_text(text, encoding="utf-8")


def test_what_a_test_leaves_fails_it(suite: pytest.Pytester) -> None:
    """The message has the name of what is left, and the line that has made it."""
    write(suite, LEFT)
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=3, errors=2)
    named = {line for line in result.outlines if re.match("  (thread|task|process) ", line)}
    lines = Path(suite.path, "test_it.py").read_text(encoding="utf-8").splitlines()
    expected = {
        rf"{re.escape(what)}.*, (started|created) in test_it\.py:{number} in "
        for number, line in enumerate(lines, 1)
        if (what := line.partition("  # ")[2])
    }
    expected.add("process .*, started in an unknown place")
    for pattern in expected:
        assert sum(bool(re.search(pattern, line)) for line in named) == 1, (pattern, named)
    assert len(named) == len(expected), named


def test_what_is_not_left_by_a_test_is_no_error(suite: pytest.Pytester) -> None:
    """Objects live no longer than without the setting, and pytest gives the methods back."""
    for name, code in CLEAN.items():
        write(suite, code, name)
    main = """
        import pytest, threading, subprocess
        before = threading.Thread.start, subprocess.Popen.__init__
        assert pytest.main() == 0
        assert before == (threading.Thread.start, subprocess.Popen.__init__)
    """
    result = suite.runpython(suite.makepyfile(main=main))
    assert result.ret == 0
    result.assert_outcomes(passed=13, xfailed=1, skipped=1)


MARKED = """
@pytest.mark.leaves_nothing
def test_marked(): new("one").start()
def test_not_marked(): new("two").start()
@pytest.mark.leaves_nothing(ignore="thread 'thr")
def test_ignored(): new("three").start()
@pytest.mark.leaves_nothing(ignore=[""])
def test_wrong_pattern(): pass
@pytest.mark.leaves_nothing(thread=False)
def test_wrong_option(): pass
"""


def test_marker_checks_one_test_and_takes_patterns(suite: pytest.Pytester) -> None:
    suite.makeini(SETTINGS)
    write(suite, MARKED)
    result = suite.runpytest_subprocess()
    result.assert_outcomes(passed=5, errors=3)
    text = result.stdout.str()
    assert set(re.findall("  thread '(.*)', started", text)) == {"one"}
    assert "the marker leaves_nothing: a regular expression must not be empty" in text
    assert "the marker leaves_nothing takes ignore= only" in text


@pytest.mark.slow
def test_workers_of_xdist_and_reruns_check_as_well(suite: pytest.Pytester) -> None:
    write(suite, "def test_it(): new().start()\n")
    result = suite.runpytest_subprocess("-n", "1", "--reruns", "1", "-p", "no:cacheprovider")
    assert "thread 'lone', started in" in result.stdout.str()
    assert result.ret == 1

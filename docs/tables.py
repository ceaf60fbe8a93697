"""The tables of the documentation, made from ``benchmarks/results/``.

A missing file or key is an error, so a page can only show figures that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from benchmarks.charts import PROGRAMS
from benchmarks.results_file import RESULTS, described
from tests.support.versions import ROWS

Result = dict[str, Any]
TABLES: dict[str, Callable[[], str]] = {}


def read_result(name: str) -> Result:
    """Read ``results/<name>.json``."""
    result: Result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def from_file(name: str) -> Callable[[Callable[[Result], str]], Callable[[Result], str]]:
    """Register a function that makes a table of ``results/<name>.json``."""

    def register(make: Callable[[Result], str]) -> Callable[[Result], str]:
        def with_source() -> str:
            result = read_result(name)
            source = f"`benchmarks/results/{name}.json`"
            machine = result["machine"]
            where = described(machine)
            if "gpu" in result:
                gpu = result["gpu"]
                where = f"{gpu['name']}, driver {gpu['driver']}; {where}; commit {result['commit']}"
            return f"{make(result)}\n\n*Measured on {where}; {machine['date']}; {source}*"

        TABLES[make.__name__] = with_source
        return make

    return register


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table. The first column is aligned left, the others right."""
    heads = list(heads)
    lines = [heads, [":--", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def short(value: float) -> str:
    """Return a number with two or three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


RAY_ROLES = ("driver", "actors", "rest of Ray")


@from_file("postgres")
def postgres_search(result: Result) -> str:
    """Times and quality of searches in Postgres."""
    scale = result["scale"]
    exact = scale["kinds"]["exact"]
    quality = ", ".join(
        f"{mode} {result['modes'][mode]['nDCG@10']['mean']:.3f}" for mode in result["modes"]
    )
    return (
        f"An exact search of {scale['vectors']:,} vectors of {scale['dimension']} takes "
        f"{exact['all']['ms']:.0f} ms, and {exact['one in 100']['ms']:.0f} ms with a filter that "
        f"one in 100 documents matches. Writing them took "
        f"{scale['vectors'] / scale['rows_per_s']:.0f} s, on a machine that was busy with other "
        f"work. nDCG@10 on SciFact without passages: {quality}."
    )


@from_file("release")
def release_tensors(result: Result) -> str:
    """MB of 640 MB that remain resident, and milliseconds, for each size of tensors."""
    methods = ("del", "del+gc", "accelerate", "torch_utils")

    def cell(row: Result) -> str:
        return f"{6.4 * (100 - row['percent']):.0f} MB, {row['ms']:.0f} ms"

    return table(
        ["tensors", "`del`", "`del` and `gc.collect()`", "accelerate", "`torch_utils`"],
        ([row["sizes"], *(cell(row[m]) for m in methods)] for row in result["tensors"]),
    )


@from_file("release")
def release_minilm(result: Result) -> str:
    """What each way returns of MiniLM after it has encoded 5,000 texts."""
    return table(
        ["way", "taken", "left", "time", "full collections"],
        (
            [
                f"`{way}`",
                f"{row['grown_mb']:.0f} MB",
                f"{row['grown_mb'] * (1 - row['percent'] / 100):.0f} MB",
                f"{row['ms']:.0f} ms",
                row["full_collections"],
            ]
            for way, row in result["minilm"].items()
        ),
    )


@from_file("release")
def release_wrapper(result: Result) -> str:
    """What each way does with an object that keeps MiniLM, beside 500,000 other objects."""
    return table(
        ["way", "weights freed", "time", "another thread waits", "full collections"],
        (
            [
                f"`{way}`",
                f"{row['percent_of_weights']:.0f}%",
                f"{row['ms']:.0f} ms",
                f"{row['worst_stall_ms']:.0f} ms",
                row["full_collections"],
            ]
            for way, row in result["wrapper"].items()
        ),
    )


@from_file("census")
def census_costs(result: Result) -> str:
    """Milliseconds of an empty block and of a census, and seconds of a suite."""
    suite = result["suite_of_300_s"]
    rows = [
        [f"{row['objects']:,} objects", *(f"{row[key]:.0f} ms" for key in _CENSUS)]
        for row in result["blocks"]
    ]
    text = table(
        ["", "`gc.collect()`", "an empty block", "`live_memory()`", "its table with holders"], rows
    )
    seconds = f"{suite['off']:.1f} s, and {suite['on']:.1f} s with the option"
    return f"{text}\n\nA suite of 300 tests takes {seconds}."


_CENSUS = ("gc_ms", "block_ms", "census_ms", "table_ms")


@from_file("release")
def release_many(result: Result) -> str:
    """Microseconds for each of 16,000 tensors, and the longest wait of another thread."""
    rows = result["many_tensors"]
    shapes = dict.fromkeys(name.partition(",")[0] for name in rows if "," in name)
    pairs = {
        shape: [rows[f"{shape}, {way}"] for way in ("del+gc", "torch_utils")] for shape in shapes
    }
    return table(
        [
            "16,000 tensors with gradients in",
            *("`del` and `gc.collect()`", "`torch_utils`"),
            *("longest wait: `del`", "longest wait: `torch_utils`"),
        ],
        (
            [
                shape,
                *(f"{row['us_per_tensor']:.0f} us" for row in pair),
                *(f"{row['worst_stall_ms']:.0f} ms" for row in pair),
            ]
            for shape, pair in pairs.items()
        ),
    )


@from_file("release")
def release_beside_threads(result: Result) -> str:
    """A release of 50 MB in each of 20 rounds, alone and beside blocked threads."""
    return table(
        ["blocked threads", "median of a release", "longest", "left after all rounds"],
        (
            [
                threads,
                f"{row['median_ms']:.1f} ms",
                f"{row['worst_ms']:.1f} ms",
                f"{max(row['grown_mb'], 0):.0f} MB",
            ]
            for threads, row in result["blocked_threads"].items()
        ),
    )


@from_file("release")
def small_costs(result: Result) -> str:
    """What the library costs where it has nothing to do."""
    costs = result["nothing_to_do"]
    return table(
        ["cost", ""],
        [
            [
                "`safe_cuda_empty_cache()` beside a plain call",
                f"{costs['empty_cache_extra_us']:.2f} us",
            ],
            ["`import torch_utils` beside an empty package", f"{costs['import_extra_ms']:.2f} ms"],
        ],
    )


@from_file("exit")
def exit_time(result: Result) -> str:
    """Seconds from the last line of a program to the end of its process."""
    labels = {
        "torch": "`import torch`",
        "sentence-transformers": "sentence-transformers with MiniLM loaded",
        "rag_demo": "`rag_demo` with a model and a retriever open",
    }
    return table(
        ["program", "ordinary exit", "after `gc.freeze`", "ratio"],
        (
            [labels[name], *(f"{s:.2f} s" for s in row["median_s"].values()), f"{row['ratio']:.1f}"]
            for name, row in result["programs"].items()
        ),
    )


@from_file("cycles")
def hosting_memory(result: Result) -> str:
    """Resident memory over 20 rounds of load, encode and unload."""
    labels = {
        "del": "`del model; gc.collect()`",
        "thread": '`ModelHost(isolation="thread")`',
        "process": '`ModelHost(isolation="process")`',
    }
    rows = []
    for way, row in result["ways"].items():
        idle = row["idle_mb"]
        sizes = (row["before_mb"], idle[0], idle[-1], max(idle), row["peak_mb"])
        torch = "yes" if row["imported_torch"] else "no"
        rows.append([labels[way], *(f"{size:.0f}" for size in sizes), torch])
    heads = ("before", "after round 1", "after round 20", "most between rounds", "peak")
    return table(["resident memory in MB", *heads, "imports torch"], rows)


@from_file("arenas")
def shared_heap(result: Result) -> str:
    """Speed and memory of threads that share a heap, as medians of ratios to glibc's default."""
    rows = []
    for name, found in result["work"].items():
        if name == "memory":
            cells = [f"{median(one['left_mb'] for one in row):.0f} MB" for row in found.values()]
            rows.append(["left behind by four models in four threads", *cells])
            continue
        ratios = [
            median(a["per_s"] / b["per_s"] for a, b in zip(row, found["glibc"], strict=True))
            for row in found.values()
        ]
        rows.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
    heads = [name if name == "glibc" else f"`{name}`" for name in result["work"]["memory"]]
    return table(["calls per second of eight threads", *heads], rows)


@from_file("host")
def hosting_calls(result: Result) -> str:
    """Milliseconds of one call to another process that returns its argument."""
    rows = [{"bytes": row["bytes"], **row["median_us"]} for row in result["rows"]]
    ways = ("ModelHost", "multiprocessing.Pipe", "concurrent.futures")
    return table(
        ["bytes of the array", *(f"`{way}`" for way in ways)],
        ([f"{row['bytes']:,}", *(f"{row[way] / 1e3:.3g} ms" for way in ways)] for row in rows),
    )


@from_file("waits")
def hosting_waits(result: Result) -> str:
    """Milliseconds from a request for one of two places to its end."""
    return table(
        ["twelve users of two places", "requests", "median", "99%", "most"],
        (
            [f"`{name}`", f"{row['requests']:,}"]
            + [f"{row[key]:.0f} ms" for key in ("median_ms", "p99_ms", "max_ms")]
            for name, row in result["rows"].items()
        ),
    )


@from_file("sleep")
def hosting_sleep(result: Result) -> str:
    """Milliseconds until a model has left its device, and until it is back."""
    ms = result["median_ms"]
    rows = [
        ("`ModelHost`: `sleep()`, `wake()`", "ModelHost: sleep", "ModelHost: wake"),
        ("`ModelHost`: `unload()`, `load()`", "ModelHost: unload", "load"),
        ("`model.to(...)` and back", "plain to: leave", "plain to: return"),
        (
            "accelerate's `cpu_offload`, with each forward",
            "accelerate's cpu_offload: leave",
            "accelerate's cpu_offload: a forward",
        ),
        ("one copy of as many bytes", None, "a copy of as many bytes"),
    ]
    return table(
        [f"{result['nbytes']:,} bytes on {result['device']}", "leave", "return"],
        ([way, f"{ms[a]:.1f} ms" if a else "", f"{ms[b]:.1f} ms"] for way, a, b in rows),
    )


@from_file("rag")
def search(result: Result) -> str:
    """Milliseconds of one batch, beside other libraries."""
    heads = {"torch_utils": "`rag_demo`", "semantic_search": "sentence-transformers"}
    # The first cell has all libraries; the slowest do not take part in the largest cells.
    names = list(result["cells"][0]["median_s"])
    rows = []
    for cell in result["cells"]:
        ms = {name: 1e3 * seconds for name, seconds in cell["median_s"].items()}
        best = min(ms[name] for name in ms if name != "torch_utils")
        rows.append(
            [
                f"{cell['count']:,}",
                cell["batch"],
                *(short(ms[name]) if name in ms else "" for name in names),
                f"**{best / ms['torch_utils']:.1f}**",
                f"{cell['recall']:.2f}",
            ]
        )
    libraries = (heads.get(name, name) for name in names)
    return table(["documents", "queries", *libraries, "ratio", "recall"], rows)


@from_file("rag_one_thread")
def search_one_thread(result: Result) -> str:
    """The best other library's time divided by ours, with one thread each."""
    cells = {(cell["count"], cell["batch"]): cell for cell in result["cells"]}
    batches = sorted({batch for _, batch in cells})
    return table(
        ["documents", *(f"{batch} {'query' if batch == 1 else 'queries'}" for batch in batches)],
        (
            [
                f"{count:,}",
                *(
                    f"{cells[count, batch]['ratio']:.2f} ({cells[count, batch]['best']})"
                    for batch in batches
                ),
            ]
            for count in sorted({count for count, _ in cells})
        ),
    )


@from_file("open")
def saved_index(result: Result) -> str:
    """Seconds until a saved index of a million vectors is open and answers."""
    steps = {"open": "open", "first_answer": "first answer", "next_answer": "next answer"}
    return table(
        ["step", "`rag_demo`", "faiss"],
        (
            [label, *(f"{result[f'{whose}{step}_s']:.2f} s" for whose in ("", "faiss_"))]
            for step, label in steps.items()
        ),
    )


@from_file("open")
def saved_index_size(result: Result) -> str:
    """What a saved index of a million vectors takes."""
    return table(
        ["saved index", ""],
        [
            ["time to write", f"{result['save_s']:.1f} s"],
            ["size beside the vectors alone", f"{result['size_ratio_to_vectors']:.2f} times"],
            [
                "resident memory after opening",
                f"{result['resident_after_open_bytes'] / 1e6:.0f} MB",
            ],
        ],
    )


@from_file("change")
def changes(result: Result) -> str:
    """Milliseconds of one change among 200,000 documents."""
    kinds = ("PyTorchGPURetriever, in memory", "FaissRetriever, in memory", "opened, changes")
    steps = ("search before", "add", "replace", "delete", "next search")
    rows: list[list[object]] = [
        [step, *(f"{short(result['ms'][kind][step])} ms" for kind in kinds)] for step in steps
    ]
    rows += [[step, "", "", f"{short(ms)} ms"] for step, ms in result["ms"]["durable"].items()]
    heads = ("`PyTorchGPURetriever`", "`FaissRetriever`", "`PyTorchGPURetriever`, index opened")
    return table(["step", *heads], rows)


@from_file("change")
def filters_and_words(result: Result) -> str:
    """Milliseconds of filters and of searches by words, among 200,000 documents."""
    where, words = result["ms"]["where"], result["ms"]["words"]
    return table(
        ["work among 200,000 documents", "`rag_demo`", "other"],
        [
            [
                "filter: one value of 75",
                f"{short(where['where equal'])} ms",
                f"numpy, without an index: {short(where['numpy, equal'])} ms",
            ],
            ["filter: a range of ten values", f"{short(where['where range'])} ms", ""],
            ["filter and vector search", f"{short(where['where, with search'])} ms", ""],
            [
                "search by words",
                f"{short(words['words'])} ms",
                f"bm25s: {short(words['words, bm25s'])} ms",
            ],
            ["add a document, search by words", f"{short(words['add and words'])} ms", ""],
        ],
    )


@from_file("quality_scifact")
def quality(result: Result) -> str:
    """Quality on SciFact's 300 test questions."""
    metrics = list(result["modes"]["dense"])
    return table(
        ["mode", *metrics],
        (
            [f"`{mode}`", *(f"{score['mean']:.3f}" for score in scores.values())]
            for mode, scores in result["modes"].items()
        ),
    )


@from_file("quality_docs")
def fusion(result: Result) -> str:
    """nDCG@10 of three collections, by the constant of the fusion of ranks."""
    kind, metric, modes = "hybrid by the constant of its ranks", "nDCG@10", ("dense", "bm25")
    known = {"this documentation": result, "SciFact": read_result("quality_scifact")}
    rows = []
    for name, each in {**known, "Cranfield": read_result("quality_cranfield")}.items():
        scores = [*(each["modes"][mode] for mode in modes), *each[kind].values()]
        cells = (f"{score[metric]['mean']:.3f}" for score in scores)
        rows.append([f"{name}, {each['questions']} questions", *cells])
    heads = [*(f"`{mode}`" for mode in modes), *(f"hybrid, {k}" for k in result[kind])]
    return table([metric, *heads], rows)


@from_file("encode")
def encoding(result: Result) -> str:
    """Texts a second, beside sentence-transformers."""
    rows = []
    for row in result["rows"]:
        rate = {way: row["count"] / seconds for way, seconds in row["median_s"].items()}
        cells = [
            f"{short(rate[way])} ({row[way]['ratio']:.2f}x)" for way in ("float32", "bfloat16")
        ]
        cosine = f"{row['bfloat16']['least_cosine']:.4f}"
        rows.append([row["texts"], short(rate["sentence_transformers"]), *cells, cosine])
    heads = ["texts a second", "sentence-transformers", "float32", "bfloat16"]
    return table([*heads, "least cosine in bfloat16"], rows)


@from_file("ray")
def ray_cost(result: Result) -> str:
    """Seconds of processors for the same texts, by the plain command and by two actors."""
    rows = []
    plain = sum(result["rows"]["plain"]["processor_s"].values())
    for name, label in {"plain": "`rag-demo index`", "ray": "`--actors 2`"}.items():
        row = result["rows"][name]
        by_role = row["processor_s"]
        parts = (f"{by_role[role]:.0f} s" if role in by_role else "" for role in RAY_ROLES)
        whole = sum(by_role.values())
        rows.append(
            [label, *parts, f"{whole:.0f} s ({whole / plain:.2f}x)", f"{row['all_s']:.0f} s"]
        )
    texts = f"{result['rows']['ray']['texts']:,} sentences"
    return table([texts, "driver", "actors", "rest of Ray", "all processors", "wall time"], rows)


@from_file("ray")
def ray_scale(result: Result) -> str:
    """What a hundred million abstracts would take, from one measured actor and the driver.

    Both include their start.
    """
    count, by_name = 100_000_000, result["rows"]
    one, many = by_name["one actor, abstracts"], by_name["ray"]
    of_actor = one["processor_s"]["actors"] / one["texts"]
    of_driver = many["processor_s"]["driver"] / many["texts"]
    rows = []
    for machines in (1, 8, 64):
        embedding_h = count * of_actor / (16 * machines) / 3600
        writing_h = count * of_driver / 3600
        limit = "actors" if embedding_h > writing_h else "the driver"
        hours = max(embedding_h, writing_h)
        rows.append([machines, f"{hours:,.0f}", f"{16 * machines * hours:,.0f}", limit])
    return table(["machines of 16 cores", "hours", "core hours", "limited by"], rows)


@from_file("service")
def service_speed(result: Result) -> str:
    """Searches a second, alone and beside bulk work."""
    return table(
        ["setting", "requests a second", "median", "99th percentile"],
        (
            [
                setting.replace(" 1 clients", " 1 client"),
                row["requests_per_s"],
                f"{row['p50_ms']:.0f} ms",
                f"{row['p99_ms']:.0f} ms",
            ]
            for setting, row in result["speed"].items()
        ),
    )


@from_file("service")
def service_soak(result: Result) -> str:
    """What a run under load for minutes shows."""
    soak = result["soak"]
    size = soak["resident_mb"]
    return table(
        ["soak", ""],
        [
            ["clients", soak["clients"]],
            ["seconds", f"{soak['seconds']:.0f}"],
            ["requests a second", soak["requests_per_s"]],
            ["median, 99th percentile", f"{soak['p50_ms']:.0f} ms, {soak['p99_ms']:.0f} ms"],
            *([f"requests: {outcome}", f"{n:,}"] for outcome, n in soak["outcomes"].items()),
            *([f"changes: `{change}`", n] for change, n in soak["changes"].items()),
            *([f"resident memory {when}", f"{mb:.0f} MB"] for when, mb in size.items()),
            ["growth in 10,000 requests", f"{soak['slope_mb_per_10000_requests']:.2f} MB"],
            ["clean exit", "yes" if soak["clean"] else "no"],
        ],
    )


@from_file("clean_exit")
def probe_cost(result: Result) -> str:
    """What the probe and the command add to a program."""
    return table(
        ["program", "alone", "the probe adds", "`clean-exit` adds"],
        (
            [
                PROGRAMS[row["program"]],
                *(
                    f"{round(1e3 * row[n])} ms"
                    for n in ("bare_s", "probe_adds_s", "command_adds_s")
                ),
            ]
            for row in result["rows"]
        ),
    )


@from_file("clean_exit_lint")
def lint_time(result: Result) -> str:
    """What the linter takes."""
    return table(
        ["what", "files", "processor time"],
        ([r["what"], f"{r['files']:,}", f"{r['processor_s']:.1f} s"] for r in result["rows"]),
    )


@from_file("versions")
def versions(result: Result) -> str:
    """Show the sets of versions with which every test passed."""
    rows = {
        name: row for name, row in result["rows"].items() if name in ROWS and not row.get("failed")
    }
    if not rows:
        return "No set of versions has passed all tests on one commit, so there is no table."
    left_out, last = ("failed", "names_of_failed"), ("passed", "skipped")
    names = dict.fromkeys(
        column for row in rows.values() for column in row if column not in left_out
    )
    columns = ["python", "torch", *sorted(names.keys() - {"python", "torch", *last}), *last]
    return table(
        ["packages", *columns],
        ([name, *(row.get(column, "") for column in columns)] for name, row in rows.items()),
    )


@from_file("gpu_stand_in")
def stand_in(result: Result) -> str:
    """Outcomes of the GPU tests over the stand-in for the CUDA driver."""
    outcomes = [test["outcome"] for test in result["tests"].values()]
    return table(
        ["tests over the stand-in", ""],
        ([outcome, outcomes.count(outcome)] for outcome in ("passed", "failed", "skipped")),
    )


GPU_WAYS = {
    "torch_utils": "`torch_utils.release`",
    "accelerate": "`accelerate.release_memory`",
    "del, gc.collect, empty_cache": "`del`, `gc.collect`, `empty_cache`",
}


@from_file("gpu/release")
def gpu_release(result: Result) -> str:
    """Time and share of the memory that is back, of a BERT base."""
    rows = {row["another_variable"]: row for row in result["rows"] if row["model"] == "BERT base"}
    return table(
        ["BERT base on a GPU", "a variable still names it", "no variable names it"],
        (
            [
                label,
                *(
                    f"{row['ways'][way]['ms']:.1f} ms, {row['ways'][way]['freed_share']:.0%} back"
                    for row in (rows[True], rows[False])
                ),
            ]
            for way, label in GPU_WAYS.items()
        ),
    )


@from_file("gpu/release")
def gpu_release_large(result: Result) -> str:
    """Time of a release of 10 GB, and how long another thread waits."""
    rows = [row for row in result["rows"] if row["model"] == "tensors"]
    heads = [
        f"{row['model_bytes'] / 1e9:.0f} GB in tensors of {row['tensor_bytes'] >> 20} MiB"
        for row in rows
    ]
    return table(
        ["time, longest wait of another thread", *heads],
        (
            [
                label,
                *(
                    f"{row['ways'][way]['ms']:.1f} ms, {row['ways'][way]['longest_wait_ms']:.1f} ms"
                    for row in rows
                ),
            ]
            for way, label in GPU_WAYS.items()
        ),
    )


@from_file("gpu/search")
def gpu_search(result: Result) -> str:
    """Milliseconds of one batch, beside `mm` and `topk`."""
    rows = [row for row in result["rows"] if "mm_topk_ms" in row]
    return table(
        ["vectors", "dtype", "queries", "`rag_demo`", "`mm`, `topk`", "`semantic_search`", "ratio"],
        (
            [
                f"{row['rows']:,}",
                row["dtype"],
                row["batch"],
                *(f"{short(row[f'{way}_ms'])} ms" for way in ("ours", "mm_topk")),
                f"{short(row['semantic_search_ms'])} ms" if "semantic_search_ms" in row else "",
                f"**{row['mm_topk_ms'] / row['ours_ms']:.2f}**",
            ]
            for row in rows
        ),
    )


@from_file("gpu/encode")
def gpu_encode(result: Result) -> str:
    """Texts a second of each way, at its best batch size."""
    best: dict[tuple[str, str], Result] = {}
    for row in result["rows"]:
        key = row["way"], row["dtype"]
        if row.get("texts_per_s", 0) > best.get(key, {}).get("texts_per_s", 0):
            best[key] = row
    dtypes = sorted({dtype for _, dtype in best})

    def cell(way: str, dtype: str) -> str:
        row = best.get((way, dtype))
        if row is None:
            return ""
        batch = f"{row['batch']} texts" if "batch" in row else f"{row['tokens']:,} tokens"
        return f"{short(row['texts_per_s'])} ({batch})"

    return table(
        ["texts a second (size of the batch)", *dtypes],
        (
            [f"`{way}`", *(cell(way, dtype) for dtype in dtypes)]
            for way in dict.fromkeys(way for way, _ in best)
        ),
    )


@from_file("gpu/tests")
def gpu_tests(result: Result) -> str:
    """Outcomes of the GPU tests, and the reasons of those that did not pass."""
    tests = result["gpu_tests"]["tests"]
    outcomes = [test["outcome"] for test in tests.values()]
    rows = [[outcome, outcomes.count(outcome)] for outcome in dict.fromkeys(outcomes)]
    return table(["tests on the GPU", ""], rows)


@from_file("gpu/programs")
def gpu_programs(result: Result) -> str:
    """Outcomes of ordinary programs."""
    programs = result["programs"].values()
    failed = [program for program in programs if program["outcome"] == "failed"]
    return table(
        ["ordinary programs", ""],
        [
            ["passed", len(programs) - len(failed)],
            *([f"failed: {program['reason']}", 1] for program in failed),
        ],
    )


@from_file("gpu/measure")
def gpu_measure(result: Result) -> str:
    """Ratio of `measure` to other timers."""
    return table(
        ["work", "beside", "`measure` / the other"],
        ([row["work"], row.get("peer", "triton"), f"{row['ratio']:.3f}"] for row in result["rows"]),
    )

"""Pictures of the service's page for docs/, light and dark."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rag_demo import EmbeddingModel, FaissRetriever
from tests.support.browsing import browser, serving_on_a_port

TEXTS = [
    "A lease lends a model for a block. The keep-alive time starts when the last lease ends.",
    "Memory is released in place: a variable that still names the model has an empty one.",
    "The old index answers until the new one is open. No request fails.",
    "Open resources are closed at the end of the program while every module is intact.",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder, "index")
        with EmbeddingModel(device="cpu") as model, FaissRetriever(model) as retriever:
            retriever.add(TEXTS, [{"path": f"notes/{n}.md"} for n in range(len(TEXTS))])
            retriever.save(index)
        with serving_on_a_port(index, None) as url, browser() as chromium:
            for scheme in ("light", "dark"):
                page = chromium.new_page(
                    viewport={"width": 1100, "height": 700}, color_scheme=scheme
                )
                page.goto(url)
                page.get_by_label("Question").fill("when is the memory of a model released?")
                page.keyboard.press("Enter")
                page.locator("#results li").first.wait_for()
                page.get_by_text("ready, 4 documents").wait_for()
                page.screenshot(path=ROOT / "docs" / f"service-{scheme}.png")
                page.close()


if __name__ == "__main__":
    main()

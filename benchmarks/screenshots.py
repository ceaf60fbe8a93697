"""Two pictures of the service's page, light and dark, for docs/."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from rag_demo import EmbeddingModel, FaissRetriever
from support.browsing import browser, serving_on_a_port

TEXTS = [
    "A lease lends a model for the length of a block. The clock starts when the last lease ends.",
    "Memory is given back in place: whoever still names the model has an empty one.",
    "The old index answers until the new one is ready. No request fails.",
    "What is still open when the program ends is closed while every module is intact.",
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
                page.get_by_label("Results", exact=True).first.fill("3")
                page.get_by_label("Question").fill("when is the memory of a model given back?")
                for _ in range(2):  # Asked again it is loaded again: one sees both.
                    page.keyboard.press("Enter")
                    page.locator("#results li").first.wait_for()
                    page.wait_for_timeout(3000)  # The picture of the memory needs some seconds.
                    page.get_by_role("button", name="Give back all-MiniLM").click()
                    page.locator("#returned", has_text="freed").wait_for()
                    page.wait_for_timeout(3000)
                    page.get_by_label("Question").focus()
                page.screenshot(path=ROOT / "docs" / f"service-{scheme}.png")
                page.close()


if __name__ == "__main__":
    main()

import builtins

import pytest
import torch
from classifier import Classifier

from tests.examples.applications.measure import Storages, anonymous_mb, settle
from torch_utils import ResourceClosedError


@pytest.mark.parametrize("words", [[3], [3, 1, 4]])
def test_labels_are_stable(classifier, words):
    assert classifier.label(words) == classifier.label(words)


def test_closed_classifier_cannot_be_used(classifier):
    classifier.close()
    with pytest.raises(ResourceClosedError):
        classifier.label([3])


def test_close_frees_the_layers_and_nothing_else(classifier, embeddings):
    expected = embeddings(torch.tensor([3])).clone()
    layers = Storages(classifier.layers.parameters())
    classifier.close()
    assert layers.alive_mb() == 0
    assert torch.equal(embeddings(torch.tensor([3])), expected)


@pytest.mark.clean_exit(max_shutdown_s=100)  # Continuous integration may be slow.
class TestExit:
    def test_of_a_closed_classifier(self, classifier, journal):
        classifier.label([3])
        classifier.close()
        assert journal.read_text() == "released\n"

    def test_of_an_open_classifier(self, embeddings, journal):
        # Another module keeps it, until the end of the interpreter.
        builtins.classifier = Classifier(embeddings, journal)
        builtins.classifier.label([3])


@pytest.mark.slow
def test_memory_stays_flat(embeddings, journal):
    settle()
    before = anonymous_mb()
    for _ in range(5):
        with Classifier(embeddings, journal) as classifier:
            classifier.label([3])
    assert anonymous_mb() - before < 25


@pytest.mark.slow
@pytest.mark.clean_exit(max_shutdown_s=100)
def test_exit_after_many_rounds(embeddings, journal):
    for _ in range(5):
        Classifier(embeddings, journal).label([3])

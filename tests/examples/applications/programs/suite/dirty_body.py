import pytest


class Model:
    def __del__(self):
        self.file.close()  # This file was never opened.


@pytest.mark.clean_exit
def test_drops_a_model():
    model = Model()
    del model

"""The cases that several tests share; each is computed once."""

import pytest
from training_cases import Case, make_case

from gyre_lib.models.tiny_model import EXPERTS


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Output layer of its own; a vocabulary that tensor parallelism has to pad."""
    return make_case(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Output layer shared with the embedding."""
    return make_case(tmp_path_factory.mktemp("tied"), seed=1, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A mixture of 8 experts, 2 for each token."""
    return make_case(tmp_path_factory.mktemp("experts"), seed=2, **EXPERTS)

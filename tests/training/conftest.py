"""The cases that several tests share; each is computed once."""

import pytest
from training_cases import Case, make_case


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Output layer of its own; a vocabulary that tensor parallelism has to pad."""
    return make_case(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Output layer shared with the embedding."""
    return make_case(tmp_path_factory.mktemp("tied"), seed=1, tie_word_embeddings=True)

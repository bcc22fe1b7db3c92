"""Whose error it is: the user's mistakes end in one line, everything else keeps its traceback."""

import json

import numpy as np
import pytest
import torch

from bigscl.common.failures import explain
from bigscl.common.user_error import UserError
from bigscl.config import ConfigError, make_config
from bigscl.data.build_index import map_in_processes
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.index import sample_ids
from bigscl.data.tar import expand
from bigscl.models.families import create_network
from bigscl.store import StoreError


def error_of(call):
    with pytest.raises(ValueError) as caught:
        call()
    return caught.value


def test_a_mistake_that_our_code_names_is_one_line():
    assert "backbone" in explain(error_of(lambda: create_network("resnet5000", 3)))
    wrong = error_of(lambda: evaluation_plan(np.array([1]), 1, batch_size=0))
    assert explain(wrong) == "batch_size: 0, expected at least 1"
    assert "2 mistakes" in explain(error_of(lambda: make_config({"run": "x"})))


def test_an_error_in_the_users_network_keeps_its_traceback():
    def network():
        raise ValueError("heads: 3, expected 4")

    assert explain(error_of(network)) is None


def test_an_error_that_a_library_raises_keeps_its_traceback():
    norm = torch.nn.BatchNorm1d(2)
    error = error_of(lambda: norm(torch.zeros(1, 2)))
    assert "more than 1 value per channel" in str(error)
    assert explain(error) is None
    assert explain(error_of(lambda: json.loads("{"))) is None


def test_an_operation_that_fails_in_our_own_code_keeps_its_traceback():
    """numpy raises it, but the innermost frame is ours."""
    assert explain(error_of(lambda: sample_ids(np.array([], np.int64)))) is None


def test_a_mistake_found_in_another_process_is_one_line():
    error = error_of(lambda: list(map_in_processes(expand, ["/nowhere/train-*.tar"], 1)))
    assert "/nowhere/train-*.tar" in explain(error)


def test_errors_of_the_store_are_one_line():
    assert explain(StoreError("the store is gone")) == "the store is gone"


def test_the_users_own_except_clauses_see_a_value_error():
    assert issubclass(UserError, ValueError)
    assert issubclass(ConfigError, UserError)

import os

import pytest

from bigscl.config.load import FOLDER
from tests.test_tools.conftest import bigscl


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_listed_with_their_first_comment():
    found = bigscl("configs", "--json").json()
    assert found["imagenet_resnet50_scl"].startswith("ImageNet-1K, ResNet-50 fine-tuned, expected negative")
    assert found["accelerate/8gpu.yaml"].startswith("One machine with eight GPUs")
    assert {path.stem for path in FOLDER.glob("*.yaml")} <= found.keys()
    assert all(found[path.stem] for path in FOLDER.glob("*.yaml"))
    assert "voc12_lite0_scl  Pascal VOC 2012" in bigscl("configs", "voc12_lite0_scl").out


def test_one_or_all_are_copied_and_nothing_is_overwritten(empty_folder):
    assert bigscl("configs", "quickstart_scl", "--to", "mine").code == 0
    copy = empty_folder / "mine" / "quickstart_scl.yaml"
    assert copy.read_bytes() == (FOLDER / "quickstart_scl.yaml").read_bytes()
    assert os.listdir("mine") == ["quickstart_scl.yaml"]
    assert "1 file had the same content" in bigscl("configs", "--to", "mine").out
    assert (empty_folder / "mine" / "accelerate" / "8gpu.yaml").exists()
    copy.write_text("mine")
    (empty_folder / "mine" / "slurm" / "train.sbatch").unlink()
    refused = bigscl("configs", "--to", "mine")
    assert refused.code == 2
    assert f"{copy.relative_to(empty_folder)}: is there already with other content" in refused.err
    assert copy.read_text() == "mine"
    assert not (empty_folder / "mine" / "slurm" / "train.sbatch").exists(), (
        "refused before anything is copied"
    )


def test_an_unknown_name_is_refused_with_near_ones():
    answer = bigscl("configs", "lite0_scl", "--to", "mine")
    assert answer.code == 2
    assert "Did you mean coco14_lite0_scl, coco14_lite0_scl_plus, voc12_lite0_scl?" in answer.err
    assert not os.path.exists("mine")


def test_the_name_of_a_packaged_run_is_a_config_unless_there_is_such_a_file(empty_folder):
    facts = bigscl("plan", "voc12_lite0_scl", "--samples", 5717, "--classes", 20, "--json").json()
    assert facts["run"] == "runs/voc12_lite0_scl"
    (empty_folder / "voc12_lite0_scl").write_text("run: elsewhere")
    assert "2 mistakes" in bigscl("plan", "voc12_lite0_scl").err


def test_a_plan_without_shards_says_how_to_get_one():
    answer = bigscl("plan", "imagenet_resnet50_scl")
    assert answer.code == 2
    assert "no shards there" in answer.err
    assert "--samples 1281167 --classes 1000" in answer.err
    assert "`bigscl configs` lists" in bigscl("plan", "imagenet_resnet51_scl").err

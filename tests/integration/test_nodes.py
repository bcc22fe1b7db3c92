"""Two nodes: two launchers that find each other over the network, one shared store."""

from tests.builders import write_config
from tests.forks import Child, free_port
from tests.integration.runs import TIMEOUT, assert_same_runs, command


def test_two_launchers_equal_one_with_two_processes_bit_for_bit(tmp_path, trainer_server, noisy, shards):
    model = {"backbone": "tests.integration.tiny:noisy_net"}
    config = write_config(tmp_path / "run.yaml", shards, model=model)
    nodes, shared = [], {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    for rank in range(2):
        _, _, *launcher = command([config], processes=2, machine_rank=rank, **shared)
        nodes.append(Child(trainer_server, *launcher, output=tmp_path / f"node-{rank}.txt"))
    codes = [node.wait(TIMEOUT) for node in nodes]
    outputs = [(tmp_path / f"node-{rank}.txt").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(outputs)
    assert "world size 2" in outputs[0]
    assert "epoch 2 step" not in outputs[1]
    assert_same_runs(tmp_path / "run", noisy[2], shards)

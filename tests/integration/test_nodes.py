"""Two nodes: two launchers that find each other over the network, one shared store."""

import subprocess

from tests.integration.runs import (
    ENVIRONMENT,
    ROOT,
    TIMEOUT,
    assert_same_runs,
    command,
    free_port,
    write_config,
)


def test_two_launchers_equal_one_with_two_processes_bit_for_bit(tmp_path, noisy, shards):
    model = {"backbone": "tests.integration.tiny:noisy_net"}
    config = write_config(tmp_path / "run.yaml", shards, model=model)
    port = free_port()
    nodes = [
        subprocess.Popen(
            command(
                [config],
                processes=2,
                num_machines=2,
                machine_rank=rank,
                main_process_ip="127.0.0.1",
                main_process_port=port,
            ),
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=TIMEOUT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert "world size 2" in outputs[0]
    assert "epoch 2 step" not in outputs[1]
    assert_same_runs(tmp_path / "run", noisy[2], shards)

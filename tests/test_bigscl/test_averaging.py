import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bigscl.models.spatial import WeightAverage


def change(model):
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.add_(torch.ones_like(each) if each.dtype == torch.int64 else torch.randn_like(each))


def test_average_is_that_of_torch_bit_for_bit_also_after_a_restart():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2).double())
    ours = WeightAverage(model, 0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for step in range(6):
        change(model)
        ours.update_parameters(model)
        theirs.update_parameters(model)
        if step == 3:
            saved, ours = ours.state_dict(), WeightAverage(model, 0.9)
            ours.load_state_dict(saved)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name

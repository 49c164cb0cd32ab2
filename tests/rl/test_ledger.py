"""The ledger's arithmetic against numbers worked by hand."""

import pytest

from scalerl.rl.ledger import FlopModel, Ledger


def test_forward_flops_by_hand():
    model = FlopModel(n_active=1000, layers=2, width=8)
    # 3 tokens with contexts 1, 2, 3: 2 * 1000 * 3 + 4 * 2 * 8 * 6
    assert model.sequence(3) == 6000 + 384
    assert model.sequence(3) == model.forward(1, 1) + model.forward(1, 2) + model.forward(1, 3)


def test_hours_are_wall_hours_times_devices_and_evaluation_stands_apart():
    ledger = Ledger(devices=2)
    ledger.add_training(wall=3600, generator_busy=2700, trainer_busy=1800)
    ledger.add_evaluation(wall=360, flops=5.0)
    ledger.add_checkpoint(wall=36)
    axes = ledger.axes()
    assert axes["device_hours"] == pytest.approx(2.0)
    assert axes["eval_device_hours"] == pytest.approx(0.2)
    assert axes["checkpoint_device_hours"] == pytest.approx(0.02)
    assert axes["generator_idle"] == pytest.approx(0.25)
    assert axes["trainer_idle"] == pytest.approx(0.5)
    assert axes["flops"] == 0.0 and axes["weight_sync"] == 0.0


def test_weights_move_on_the_training_clock_while_both_sides_idle():
    ledger = Ledger(devices=2)
    ledger.add_training(wall=2700, generator_busy=2700, trainer_busy=1350)
    ledger.add_sync(900)
    axes = ledger.axes()
    assert axes["device_hours"] == pytest.approx(2.0)
    assert axes["weight_sync"] == pytest.approx(0.25)
    assert axes["generator_idle"] == pytest.approx(0.25)
    assert axes["trainer_idle"] == pytest.approx(0.625)


def test_state_round_trip():
    ledger = Ledger(devices=2, step=3, flops=7.0)
    other = Ledger(devices=2)
    other.load_state_dict(ledger.state_dict())
    assert other.axes() == ledger.axes()

"""Which roles may leave the device."""

import pytest

from megarl import device
from megarl.config.load import load_config
from megarl.residents import open_offloads
from megarl.trainer.roles import Role


@pytest.mark.parametrize(("engine", "parked"), [("vllm", {"actor", "critic"}), ("naive", {"critic"})])
def test_the_actors_weights_stay_where_it_answers_itself(monkeypatch, engine, parked):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    words = [f"rollout.name={engine}", "actor.offload.params=true", "critic.offload.params=true"]
    roles = {name: Role.__new__(Role) for name in ("actor", "critic")}
    assert set(open_offloads(load_config(None, words), dict(roles))) == parked

"""A layout is a value. Its repr is code that makes the same layout, except for the name.

Choreo refuses a layout that contradicts itself, or does not fit the algorithm or the number of environments. The message says what
to do.
"""

import pickle

import jaxtyping
import pytest

from choreo.errors import LayoutError
from choreo.layouts import (
    ALIASES,
    PRESETS,
    Group,
    Layout,
    central,
    coarse,
    find,
    fine,
    fused,
    multi_learner,
    per_agent,
    sebulba,
)
from choreo.layouts.base import MAX_BLOCKS

ROLES = ["env", "actor", "learner"]


def refusal(fn, *args, **kwargs) -> str:
    with pytest.raises(LayoutError) as error:
        fn(*args, **kwargs)
    return str(error.value)


@pytest.fixture
def unchecked(monkeypatch):
    """Disable the checks of annotations at run time. Then a wrong type reaches Choreo's own check, as in a user's program."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


LAYOUTS = [
    fused(),
    coarse(),
    coarse(4),
    coarse(2, exact=True),
    fine(3),
    fine(2, exact=True),
    fused(devices=2, shards=4),
    coarse(2, shards=2, max_lag=3),
    multi_learner(4),
    sebulba(4, 2, max_lag=1),
    central(2, max_lag=4, merge="any"),
    per_agent(),
    Layout(Group("env", replicas=8, device="cpu"), Group("actor", replicas=2, device="gpu"), Group("buffer", "learner", device="gpu")),
    Layout(Group("env", "actor"), Group("critic"), Group("learner"), exact=True, name="mine"),
]  # fmt: skip


class TestAValue:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
    def test_the_repr_is_code_that_makes_the_layout(self, layout):
        back = eval(repr(layout), {"Layout": Layout, "Group": Group})
        assert repr(back) == repr(layout)
        settings = {name: getattr(back, name) for name in ("exact", "shards", "max_lag", "merge")}
        assert Layout(*back.groups, **settings, name=layout.name) == layout
        assert pickle.loads(pickle.dumps(layout)) == layout

    def test_equal_layouts_are_equal_and_hash_alike(self):
        assert len({*LAYOUTS, *[coarse(4), fused()]}) == len(LAYOUTS)
        assert coarse(2) != coarse(4) and coarse(2) != coarse(2, exact=True)

    def test_layouts_and_groups_cannot_be_changed(self):
        with pytest.raises(AttributeError):
            coarse(2).exact = True  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(AttributeError):
            Group("env").replicas = 2  # pyright: ignore[reportAttributeAccessIssue]


class TestPresets:
    def test_a_preset_has_the_name_under_which_it_is_listed(self):
        assert {make().name for make in PRESETS.values()} == set(PRESETS)
        assert {name: make().name for name, make in PRESETS.items()} == {name: name for name in PRESETS}

    def test_presets_put_roles_into_groups(self):
        assert [g.roles for g in fused().groups] == [("env", "actor", "buffer", "learner")]
        assert [(g.roles, g.replicas) for g in coarse(3).groups] == [
            (("env", "actor"), 3),
            (("buffer", "learner"), None),
        ]
        assert [(g.roles, g.replicas) for g in fine(3).groups] == [
            (("env",), 3),
            (("actor", "buffer", "learner"), None),
        ]

    def test_presets_have_default_numbers_of_shards(self):
        assert (fused().shards, fused(devices=4).shards, fused(devices=4, shards=1).shards) == (1, 4, 1)
        assert (coarse(4).shards, fine(4).shards, coarse(2, shards=4).shards) == (1, 1, 4)
        assert (multi_learner(4).shards, multi_learner(2, shards=8).shards) == (4, 8)
        assert (sebulba(4, 2).shards, sebulba(2, 3).shards, sebulba(2, 3, shards=12).shards) == (4, 6, 12)
        assert (central(4).shards, central(4, merge="any").shards) == (4, 1)

    def test_workers_must_be_at_least_one(self):
        assert refusal(coarse, 0) == (
            "Group('env+actor', replicas=0) needs at least one replica.\nTo run roles together at one site, name them in one Group."
        )


class TestAliases:
    def test_names_of_known_systems_are_aliases(self):
        assert find("anakin") is find("pure_jax_rl") is find("warp_drive") is fused
        assert find("acme") is coarse and find("seed_rl") is fine
        assert find("dd_ppo") is find("data_parallel") is multi_learner
        assert find("cleanba") is find("sebulba") is sebulba
        assert find("parameter_server") is central

    def test_the_distribution_policies_of_msrl_are_aliases(self):
        names = ("GPUOnly", "SingleLearnerCoarse", "SingleLearnerFine", "MultiLearner", "Central", "Environments")
        assert [find(name) for name in names] == [fused, coarse, fine, multi_learner, central, per_agent]

    def test_impala_is_coarse_with_lag_or_sebulba_with_lag(self):
        impala = ALIASES["impala"]
        assert impala(workers=3) == coarse(3, max_lag=4)
        assert impala(workers=2, shards=2, max_lag=1) == coarse(2, shards=2, max_lag=1)
        assert impala(workers=4, learners=2) == sebulba(4, 2, max_lag=4)

    def test_a3c_is_central_with_lag_and_merge_any(self):
        assert ALIASES["a3c"](workers=4) == central(4, max_lag=8, merge="any")
        assert ALIASES["a3c"](max_lag=3) == central(2, max_lag=3, merge="any")

    def test_case_hyphens_and_underscores_do_not_matter(self):
        assert find("SEED-RL") is find("seedrl") is find("Seed_RL") is fine
        assert find("multi-learner") is multi_learner
        assert find("corse") is None

    def test_no_two_names_are_spelled_alike(self):
        spelled = [name.lower().replace("_", "") for name in (*PRESETS, *ALIASES)]
        assert len(set(spelled)) == len(spelled)


class TestGroupsOfRoles:
    def test_a_role_that_no_group_names_belongs_to_the_group_of_the_learner(self):
        assert coarse(2).group_of("critic").name == "buffer+learner"
        assert coarse(2).sites([*ROLES, "critic"], 4).group_of["critic"] == "buffer+learner"

    def test_without_a_learner_an_unnamed_role_belongs_to_the_last_undivided_group_or_else_the_last_group(self):
        assert Layout(Group("env"), Group("actor", replicas=2)).group_of("learner").name == "env"
        assert Layout(Group("env", replicas=2), Group("actor", replicas=2)).group_of("learner").name == "actor"

    def test_sites_state_the_group_of_each_role_and_the_replicas_of_each_group(self):
        sites = coarse(2).sites(ROLES, 8)
        assert sites.group_of == {"env": "env+actor", "actor": "env+actor", "learner": "buffer+learner"}
        assert sites.replicas == {"env+actor": 2, "buffer+learner": None}
        assert (sites.default, sites.num_envs) == ("buffer+learner", 8)

    def test_a_group_without_any_of_the_algorithms_roles_is_dropped(self):
        layout = Layout(Group("env", "actor"), Group("buffer"), Group("learner"))
        assert set(layout.sites(ROLES, 4).replicas) == {"env+actor", "learner"}
        assert set(layout.sites([*ROLES, "buffer"], 4).replicas) == {"env+actor", "buffer", "learner"}


class TestRefused:
    def test_a_group_without_roles(self):
        assert refusal(Group) == 'Group() needs at least one role.\nWrite Group("env", "actor").'

    @pytest.mark.usefixtures("unchecked")
    def test_a_role_that_is_not_a_string(self):
        assert refusal(Group, "env", 3) == 'Group(\'env\', 3) needs at least one role.\nWrite Group("env", "actor").'

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("replicas", [0, -1, 1.5, "2"])
    def test_replicas_that_are_not_a_positive_integer(self, replicas):
        text = refusal(Group, "env", "actor", replicas=replicas)
        assert text.startswith(f"Group('env+actor', replicas={replicas!r}) needs at least one replica.\n")
        assert text.endswith("To run roles together at one site, name them in one Group.")

    @pytest.mark.usefixtures("unchecked")
    def test_a_layout_without_groups(self):
        assert refusal(Layout) == 'Layout() needs groups.\nWrite Layout(Group("env", "actor"), Group("learner")).'
        assert refusal(Layout, "env").startswith("Layout('env') needs groups.")

    def test_replicas_and_several_devices(self):
        assert refusal(Group, "env", replicas=2, devices=2) == (
            "Group('env', replicas=2, devices=2): only a group that is one site can have several devices.\n"
            "Leave out replicas, or devices."
        )

    def test_an_axis_that_cannot_be_divided(self):
        layout = Layout(Group("env"), Group("actor", "learner", axis="agent", replicas=2))
        assert refusal(layout.sites, ROLES, 4, {"agent": 3}) == (
            "The axis 'agent' has size 3, and cannot be divided evenly among 2 replicas of `actor+learner`.\n"
            "Use 3 replicas, or leave out replicas."
        )

    def test_an_axis_with_a_name_that_choreo_uses(self):
        layout = Layout(Group("env"), Group("actor", "learner", axis="env"))
        assert refusal(layout.sites, ROLES, 4, {"env": 4}) == (
            "Layout(Group('env'), Group('actor', 'learner', axis='env')) divides the axis 'env', a name that Choreo uses itself.\n"
            "To divide environments, leave out axis. For an axis of your own, use a different name."
        )

    def test_an_axis_without_a_name(self):
        assert refusal(Group, "actor", axis="") == (
            "Group('actor', axis='') needs the name of an axis.\n"
            'Write axis="agent", as in jax.vmap(..., axis_name="agent").'
        )

    def test_an_axis_and_shards(self):
        layout = Layout(Group("env"), Group("actor", "learner", axis="agent"), shards=2)
        assert refusal(layout.sites, ROLES, 4, {"agent": 2}).endswith(
            "divides the axis 'agent', and has 2 learner shards.\nUse one shard."
        )

    def test_an_axis_and_merge_any(self):
        layout = Layout(Group("env", replicas=2), Group("actor", "learner", axis="agent"), merge="any", max_lag=4)
        assert "It allows no axis, no shards and no exact." in refusal(layout.sites, ROLES, 4, {"agent": 2})

    def test_a_role_twice(self):
        text = refusal(Layout, Group("env", "actor"), Group("actor", "learner"))
        assert text == (
            "Layout(Group('env', 'actor'), Group('actor', 'learner')) names the role `actor` twice.\nA role belongs to one group."
        )
        assert "names the role `env` twice" in refusal(Layout, Group("env", "env"))

    def test_a_role_that_the_algorithm_does_not_have(self):
        layout = Layout(Group("env", "actr"), Group("learner"))
        assert refusal(layout.sites, ROLES, 4) == (
            "The layout names a role `actr`, which the algorithm does not have.\nDid you mean `actor`?"
        )
        strange = Layout(Group("env", "zzz"), Group("learner"))
        assert refusal(strange.sites, ROLES, 4) == (
            "The layout names a role `zzz`, which the algorithm does not have.\nIts roles are `env`, `actor`, `learner`."
        )

    def test_a_standard_role_may_be_missing(self):
        assert set(coarse(2).sites(["env", "actor"], 4).replicas) == {"env+actor", "buffer+learner"}

    def test_environments_that_cannot_be_divided(self):
        assert refusal(coarse(3).sites, ROLES, 8) == (
            "8 environments cannot be divided evenly among 3 replicas of `env+actor`.\n"
            "Use 2 or 4 workers, or 9 environments (--num-envs 9)."
        )
        assert refusal(coarse(5).sites, ROLES, 16).endswith("Use 2 or 4 workers, or 20 environments (--num-envs 20).")
        assert refusal(coarse(9).sites, ROLES, 4).endswith("Use 2 or 4 workers, or 9 environments (--num-envs 9).")
        assert refusal(coarse(2).sites, ROLES, 1) == (
            "1 environment cannot be divided evenly among 2 replicas of `env+actor`.\n"
            "Use 1 worker, or 2 environments (--num-envs 2)."
        )

    def test_blocks_that_cannot_be_divided(self):
        assert refusal(coarse(3, exact=True).sites, ROLES, 16) == (
            "8 blocks cannot be divided evenly among 3 replicas of `env+actor`.\nUse 2 or 4 workers."
        )


class TestExactBlocks:
    def blocks(self, num_envs, workers=1):
        layout = coarse(workers, exact=True)
        return layout.num_blocks(layout.groups[0], num_envs)

    @pytest.mark.parametrize(
        ("num_envs", "blocks"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (7, 1), (8, 4), (12, 6), (16, 8), (32, 16), (64, 16), (34, 2)]
    )  # fmt: skip
    def test_at_least_two_environments_per_block(self, num_envs, blocks):
        assert self.blocks(num_envs) == blocks

    @pytest.mark.parametrize("num_envs", range(1, 100))
    def test_no_larger_number_of_blocks_is_possible(self, num_envs):
        n = self.blocks(num_envs)
        fits = [k for k in range(1, MAX_BLOCKS + 1) if num_envs % k == 0 and (k == 1 or num_envs // k >= 2)]
        assert n in fits and not any(k > n for k in fits)

    def test_blocks_do_not_depend_on_the_number_of_workers(self):
        assert {self.blocks(16, workers) for workers in (1, 2, 4, 8)} == {8}

    def test_without_exact_there_is_one_block_per_replica(self):
        assert coarse(4).num_blocks(coarse(4).groups[0], 16) == 4
        assert coarse(4).num_blocks(coarse(4).groups[1], 16) is None

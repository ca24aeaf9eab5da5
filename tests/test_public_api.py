import importlib.util
import inspect
import subprocess
import sys
import textwrap

import pytest

import shardopt
import shardopt.ddp_zero_hook
import shardopt.errors
import shardopt.testing
import shardopt.torch

NAMES = [
    "CheckpointError",
    "NotConsolidatedError",
    "OverlapError",
    "ParameterChangedError",
    "RankMismatchError",
    "RemoteRankError",
    "Sharding",
    "ShardoptError",
    "StateMismatchError",
    "ZeroRedundancyOptimizer",
    "newton_schulz_work",
]

BUILTIN_KINDS = {
    "CheckpointError": ValueError,
    "NotConsolidatedError": RuntimeError,
    "OverlapError": RuntimeError,
    "ParameterChangedError": RuntimeError,
    "RankMismatchError": ValueError,
    "RemoteRankError": RuntimeError,
    "StateMismatchError": ValueError,
}

METHODS = [
    "step",
    "zero_grad",
    "add_param_group",
    "consolidate_state_dict",
    "state_dict",
    "load_state_dict",
    "clip_grad_norm_",
    "no_sync",
    "attach",
    "wait",
    "imbalance",
    "join_hook",
    "join_device",
    "join_process_group",
]

HOOKS = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def parameters(function):
    """Name, kind and default of each parameter."""
    return [
        (p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()
    ]


def run_fresh(code):
    """Run code in an interpreter of its own; return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.strip()


# --- names ----------------------------------------------------------------------------------------


def test_the_public_names_are_these():
    assert shardopt.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_can_be_had(name):
    assert getattr(shardopt, name).__name__ == name


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring(name):
    public = getattr(shardopt, name)
    assert public.__doc__ if inspect.isfunction(public) else vars(public)["__doc__"]


@pytest.mark.parametrize("name", METHODS)
def test_every_public_method_has_a_docstring(name):
    assert inspect.getattr_static(shardopt.ZeroRedundancyOptimizer, name).__doc__


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_docstring(name):
    assert getattr(shardopt.ddp_zero_hook, name).__doc__


@pytest.mark.parametrize("name", shardopt.testing.__all__)
def test_every_name_for_testing_has_a_docstring(name):
    assert getattr(shardopt.testing, name).__doc__


def test_the_names_for_testing_are_these():
    assert shardopt.testing.__all__ == ["RankError", "RankPool", "run_ranks"]


def test_the_lazy_optimizer_is_that_of_the_torch_front():
    assert shardopt.ZeroRedundancyOptimizer is shardopt.torch.ZeroRedundancyOptimizer


def test_the_torch_front_offers_the_optimizer_only():
    assert shardopt.torch.__all__ == ["ZeroRedundancyOptimizer"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'shardopt' has no attribute 'Zero'"):
        shardopt.Zero  # noqa: B018 - the access is what is tested


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert shardopt.__version__ == version("shardopt")


# --- signatures -----------------------------------------------------------------------------------


def test_the_constructor_has_the_signature_of_torch_and_one_more_keyword():
    assert parameters(shardopt.ZeroRedundancyOptimizer) == [
        ("params", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("optimizer_class", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("process_group", "POSITIONAL_OR_KEYWORD", None),
        ("parameters_as_bucket_view", "POSITIONAL_OR_KEYWORD", False),
        ("overlap_with_ddp", "POSITIONAL_OR_KEYWORD", False),
        ("sharding", "KEYWORD_ONLY", shardopt.Sharding()),
        ("defaults", "VAR_KEYWORD", inspect.Parameter.empty),
    ]


def test_sharding_has_these_options():
    assert [(name, default) for name, _, default in parameters(shardopt.Sharding)] == [
        ("granularity", "parameter"),
        ("gradients", False),
        ("step_in_backward", False),
        ("master_dtype", None),
        ("reduce_dtype", None),
        ("sum_dtype", None),
        ("bucket_mb", 25.0),
        ("shared_memory", True),
        ("state_dict", "consolidated"),
        ("elementwise", False),
        ("cost", None),
    ]


def test_clip_grad_norm_has_the_arguments_of_torch():
    assert parameters(shardopt.ZeroRedundancyOptimizer.clip_grad_norm_)[1:] == [
        ("max_norm", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("norm_type", "POSITIONAL_OR_KEYWORD", 2.0),
        ("error_if_nonfinite", "POSITIONAL_OR_KEYWORD", False),
    ]


def test_attaching_broadcasts_no_buffers_by_default():
    assert parameters(shardopt.ZeroRedundancyOptimizer.attach)[1:] == [
        ("module", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("broadcast_buffers", "KEYWORD_ONLY", False),
    ]


def test_consolidate_state_dict_goes_to_rank_0_by_default():
    assert parameters(shardopt.ZeroRedundancyOptimizer.consolidate_state_dict)[1:] == [
        ("to", "POSITIONAL_OR_KEYWORD", 0)
    ]


def test_step_takes_a_closure_first():
    assert parameters(shardopt.ZeroRedundancyOptimizer.step)[1:] == [
        ("closure", "POSITIONAL_OR_KEYWORD", None),
        ("kwargs", "VAR_KEYWORD", inspect.Parameter.empty),
    ]


@pytest.mark.parametrize("name", HOOKS)
def test_the_hooks_have_the_signature_of_torch(name):
    assert parameters(getattr(shardopt.ddp_zero_hook, name)) == [
        ("hook", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("ddp", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("zero", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("shard_buckets", "POSITIONAL_OR_KEYWORD", False),
    ]


def test_run_ranks_takes_world_sizes_a_timeout_and_a_framework():
    assert parameters(shardopt.testing.run_ranks) == [
        ("world_sizes", "VAR_POSITIONAL", inspect.Parameter.empty),
        ("timeout", "KEYWORD_ONLY", 120.0),
        ("framework", "KEYWORD_ONLY", "torch"),
    ]


# --- errors ---------------------------------------------------------------------------------------


def test_every_error_is_public():
    defined = {name for name, value in vars(shardopt.errors).items() if isinstance(value, type)}
    assert defined == {name for name in NAMES if name.endswith("Error")}


@pytest.mark.parametrize("name", BUILTIN_KINDS)
def test_every_error_is_one_of_ours(name):
    assert issubclass(getattr(shardopt, name), shardopt.ShardoptError)


@pytest.mark.parametrize(("name", "kind"), BUILTIN_KINDS.items())
def test_every_error_is_also_the_builtin_kind(name, kind):
    assert issubclass(getattr(shardopt, name), kind)


# --- what an import loads -------------------------------------------------------------------------


def test_importing_shardopt_imports_no_framework():
    loaded = run_fresh(
        """
        import sys
        import shardopt
        print([name for name in ("torch", "tensorplay", "numpy") if name in sys.modules])
        """
    )
    assert loaded == "[]"


ROOMS = [
    "partition",
    "files",
    "collectives",
    "buffers",
    "frameworks",
    "arguments",
    "shards",
    "gradients",
    "step",
    "checkpoint",
    "optimizer",
    "testing",
]


def test_importing_a_room_imports_no_framework():
    loaded = run_fresh(
        f"""
        import importlib, sys
        for room in {ROOMS}:
            importlib.import_module("shardopt." + room)
            print([room for name in ("torch", "tensorplay", "numpy") if name in sys.modules])
        """
    )
    assert loaded.splitlines() == ["[]"] * len(ROOMS)


needs_tensorplay = pytest.mark.skipif(
    importlib.util.find_spec("tensorplay") is None, reason="tensorplay is not installed"
)


@needs_tensorplay
def test_the_tensorplay_front_does_not_import_torch():
    loaded = run_fresh(
        """
        import sys
        import shardopt.tensorplay
        print(shardopt.tensorplay.__all__, "torch" in sys.modules)
        """
    )
    assert loaded == "['ZeroRedundancyOptimizer'] False"


@needs_tensorplay
def test_the_torch_front_does_not_import_tensorplay():
    loaded = run_fresh(
        """
        import sys
        import shardopt
        print(shardopt.ZeroRedundancyOptimizer.framework.name, "tensorplay" in sys.modules)
        """
    )
    assert loaded == "torch False"


@needs_tensorplay
def test_the_tensorplay_front_works_where_torch_is_not_installed():
    loaded = run_fresh(
        """
        import sys
        sys.modules["torch"] = None
        import shardopt.tensorplay
        print(shardopt.tensorplay.ZeroRedundancyOptimizer.framework.name)
        """
    )
    assert loaded == "tensorplay"


@needs_tensorplay
def test_the_tensorplay_front_has_the_signature_of_the_torch_front():
    names = run_fresh(
        """
        import inspect
        from shardopt.tensorplay import ZeroRedundancyOptimizer
        print([p.name for p in inspect.signature(ZeroRedundancyOptimizer).parameters.values()])
        """
    )
    torch_names = [name for name, _, _ in parameters(shardopt.ZeroRedundancyOptimizer)]
    assert names == str(torch_names)


def test_without_tensorplay_its_front_says_how_to_get_it():
    text = run_fresh(
        """
        import sys
        sys.modules["tensorplay"] = None
        try:
            import shardopt.tensorplay
        except ImportError as error:
            print(error)
        """
    )
    assert text == (
        "shardopt.tensorplay needs TensorPlay; install it with: pip install 'shardopt[tensorplay]'"
    )


def test_without_torch_the_optimizer_says_how_to_get_it():
    text = run_fresh(
        """
        import sys
        sys.modules["torch"] = None
        import shardopt
        try:
            shardopt.ZeroRedundancyOptimizer
        except ImportError as error:
            print(error)
        """
    )
    assert text == (
        "shardopt.ZeroRedundancyOptimizer needs torch; install it with: pip install 'shardopt[torch]'"
    )


def test_without_torch_everything_else_can_be_had():
    text = run_fresh(
        """
        import sys
        sys.modules["torch"] = None
        import shardopt
        print(shardopt.Sharding(bucket_mb=1).bucket_nbytes)
        """
    )
    assert text == str(2**20)

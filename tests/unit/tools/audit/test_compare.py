"""What an audit says of two runs, from their lines alone."""

from safe_ckpt.tools.audit.compare import category_of, compare, matching_line, noise, without_equality


def line(step, *, batch=None, zero=(), variables=None, **values):
    """Of one optimizer step: weights and a batch of its own, and what else is given, as ``category__name``."""
    own = {"weights.w": f"w{step}", "gradients.w": f"g{step}", "groups.lr": 0.1, "generators.torch": f"r{step}"}
    own |= {key.replace("__", "."): value for key, value in values.items()}
    return {"batch": batch or [f"b{step}"], "values": own, "zero": list(zero), "variables": variables or {}}


def run(first=1, last=20, **lines):
    """One rank's lines; ``s7=dict(...)`` says what is otherwise at step 7."""
    return [line(step, **lines.get(f"s{step}", {})) for step in range(first, last + 1)]


def told(resumed, whole=None, ignored=frozenset()):
    return compare({0: whole or run()}, {0: resumed}, ignored)


def categories(comparison):
    return [finding.category for finding in comparison.findings]


def test_a_run_that_goes_on_exactly_has_no_finding():
    """It is laid beside the step with whose weights it begins, wherever that is."""
    found = told(run(first=8))
    assert (found.findings, found.notes, found.steps) == ((), (), 13)


def test_of_several_steps_with_equal_weights_the_one_with_the_same_state_is_taken():
    """With a learning rate of 0 the weights stay: the optimizer and the batches decide."""
    whole = [line(step, weights__w="same", state__step__w=step) for step in range(1, 9)]
    assert matching_line(whole, line(5, weights__w="same", state__step__w=5)) == 4
    assert matching_line(whole, line(5, weights__w="other")) is None


def test_of_steps_that_are_equal_in_all_the_last_one_is_taken():
    """A warm-up from a learning rate of 0 over one batch: a resume within it is no start at the beginning."""
    whole = [line(step, weights__w="same", batch=["b"]) for step in (1, 2, 3)]
    assert matching_line([*whole, line(4)], whole[0]) == 2


def test_weights_of_no_step_and_a_start_at_the_beginning_are_told():
    """A resume that restores nothing is no equal run, though it equals the beginning."""
    (lost,) = told([line(4, weights__w="none of them")]).findings
    assert (lost.category, "no step of the run" in lost.detail) == ("weights", True)
    (again,) = told(run(first=1)).findings
    assert (again.category, "began at the beginning" in again.detail) == ("weights", True)


def test_noise_is_what_two_whole_runs_differ_in_and_is_not_told():
    """What differs without a stop says nothing of the resume."""
    whole, second = run(s9={"logged__time": 1.0}), run(s9={"logged__time": 2.0})
    ignored = noise({0: whole}, {0: second})
    assert ignored == {"logged.time"}
    assert not told(run(first=8, s9={"logged__time": 3.0}), whole, ignored).findings


def test_noise_of_any_rank_is_not_told_of_any():
    """A rank of its own measures its own time."""
    whole, second = run(s9={"logged__time": 1.0}), run(s9={"logged__time": 2.0})
    assert noise({0: run(), 1: whole}, {0: run(), 1: second}) == {"logged.time"}


def test_each_rank_tells_what_it_lost_of_a_kind():
    """One rank's generator does not hide another's."""
    ranks = {0: {"generators__torch": "other"}, 1: {"generators__python": "other"}}
    resumed = {rank: run(first=8, s8=wrong) for rank, wrong in ranks.items()}
    found = compare({0: run(), 1: run(s8={"generators__python": "own"})}, resumed, frozenset())
    assert [(one.rank, one.names) for one in found.findings] == [(0, ("torch",)), (1, ("python",))]


def test_moments_that_are_zero_or_missing_are_named_by_their_keys():
    """Each key of the optimizer's state by itself, and of how many parameters."""
    state = {"state__exp_avg__a": "x", "state__exp_avg__b": "x", "state__step__a": 7, "state__step__b": 7}
    whole = run(s8=state)
    zeroed = {**state, "state__exp_avg__a": "0", "state__exp_avg__b": "0"}
    (zero,) = told(run(first=8, s8={**zeroed, "zero": ["exp_avg"]}), whole).findings
    assert (zero.category, zero.names, zero.detail) == ("state", ("exp_avg",), "of 2 parameters; all zero")
    (missing,) = told(run(first=8), whole).findings
    assert (missing.names, missing.detail) == (("exp_avg", "step"), "of 2 parameters; missing")


def test_a_scheduler_that_shows_steps_later_is_told_with_its_step():
    """The learning rate of the optimizer is restored, and the scheduler is not: it differs at its next change."""
    (found,) = told(run(first=8, s11={"groups__lr": 0.3}), run(s11={"groups__lr": 0.2})).findings
    assert (found.category, found.step, found.resumed_at) == ("groups", 11, 8)
    assert found.detail == "0.3 instead of 0.2"
    assert str(found).startswith("step 11, 3 behind the first after the resume, rank 0: ")


def test_weights_that_a_step_changed_otherwise_are_told_and_not_their_gradients():
    """What an optimizer keeps of a parameter may be lost before it is used: the step shows nothing, and the next one all."""
    wrong = {f"s{step}": {"weights__w": f"x{step}", "gradients__w": f"x{step}"} for step in range(11, 21)}
    (found,) = told(run(first=8, **wrong)).findings
    assert (found.category, found.step, found.resumed_at) == ("weights", 11, 8)
    assert "step before" in found.means
    (found,) = told(run(first=8, s10={"gradients__w": "x"}, **wrong)).findings
    assert (found.category, found.step) == ("gradients", 10)


def test_where_a_wrong_batch_comes_from_is_told():
    """The loader began again, batches come twice, are left out, or are none of the run."""

    def means(batch):
        (found,) = told(run(first=8, s8={"batch": [batch], "gradients__w": "other"})).findings
        assert found.category == "data"
        return found.means, found.detail

    assert means("b1")[0] == "the loader began again"
    assert means("b6")[0] == "batches are trained twice"
    assert means("b10") == (
        "batches are left out",
        "the batch of step 8 is that of step 10 of the run that was not stopped",
    )
    assert means("b99")[0] == "the order of the data was not restored, or the seeds of its workers"


def test_of_several_steps_that_had_a_batch_the_nearest_is_told():
    """Each epoch has the same batches: what came twice, or was left out, is that of this epoch."""
    whole = [line(step, batch=[f"b{step % 5}"]) for step in range(1, 21)]

    def told_of(batch):
        resumed = [line(13, batch=[batch], gradients__w="other"), *whole[13:]]
        (found,) = told(resumed, whole).findings
        return found.means, found.detail.partition(" of the run")[0]

    assert told_of("b2") == ("batches are trained twice", "the batch of step 13 is that of step 12")
    assert told_of("b1") == ("batches are trained twice", "the batch of step 13 is that of step 11")
    assert told_of("b4") == ("batches are left out", "the batch of step 13 is that of step 14")
    assert told_of("b0") == ("batches are left out", "the batch of step 13 is that of step 15")


def test_the_samples_of_a_wrong_batch_are_told_where_they_are_known():
    """Some of them, and how many more; those of a loader without batches, too."""

    def detail(ours, theirs):
        whole = run()
        whole[7] |= {"samples": ours}
        resumed = run(first=8, s8={"batch": ["b1"], "gradients__w": "other"})
        resumed[0] |= {"samples": theirs}
        return told(resumed, whole).findings[0].detail.partition(" not stopped")[2]

    assert detail([[70, 71]], [[0, 1]]) == ": samples 0, 1 instead of 70, 71"
    assert detail([[70], [71]], [list(range(8))]) == ": samples 0, 1, 2, 3, 4, 5 and 2 more instead of 70, 71"
    assert detail([7], [0]) == ": samples 0 instead of 7"
    assert detail([[70, 71]], [None]) == detail([], [[0, 1]]) == ""


def test_a_save_within_an_accumulation_is_right_with_its_gradients_and_wrong_without():
    """The batches before the save are no part of the step after the resume; their gradients must be."""
    whole = run(s8={"batch": ["b8", "c8"]})
    assert not told(run(first=8, s8={"batch": ["c8"]}), whole).findings
    (lost,) = told(run(first=8, s8={"batch": ["c8"], "gradients__w": "half"}), whole).findings
    assert (lost.category, lost.means) == ("calls", "the accumulation began anew within a step")
    (anew,) = told(run(first=8, s8={"batch": ["c8", "b9"], "gradients__w": "other"}), whole).findings
    assert (anew.category, anew.means) == ("data", "the accumulation began anew within a step")
    (twice,) = told(run(first=8, s8={"batch": ["b8"], "gradients__w": "other"}), whole).findings
    assert (twice.category, twice.means) == ("data", "batches are trained twice")


def test_what_follows_from_a_difference_is_not_told_beside_it():
    """Gradients and weights differ because of a generator, and all else because the weights do, also on another rank."""
    wrong = {"generators__torch": "other", "gradients__w": "other"}
    later = {
        f"s{step}": {"weights__w": "drifted", "buffers__mean": "drifted", "logged__loss": 9.0} for step in range(9, 21)
    }
    resumed = run(first=8, s8=wrong, **later)
    assert categories(told(resumed)) == ["generators"]
    other = run(first=8, s8={"gradients__w": "other"}, **later)
    assert categories(compare({0: run(), 1: run()}, {0: other, 1: resumed}, frozenset())) == ["generators"]
    alone = told(run(first=8, s9={"gradients__w": "other"}))
    assert (categories(alone), alone.findings[0].step) == (["gradients"], 9)


def test_each_rank_is_compared_with_itself():
    """One rank's generator is named with its rank."""
    found = compare(
        {0: run(), 1: run()}, {0: run(first=8), 1: run(first=8, s8={"generators__torch": "other"})}, frozenset()
    )
    assert [(one.rank, one.names) for one in found.findings] == [(1, ("torch",))]


def test_copies_that_one_side_has_are_no_finding_and_those_of_both_are():
    """A variable that holds a loaded checkpoint is no average."""
    assert not told(run(first=8, s8={"copies__saved": ["x"]})).findings
    whole = run(s8={"copies__ema": ["x"]})
    assert categories(told(run(first=8, s8={"copies__ema": ["y"]}), whole)) == ["copies"]


def test_what_was_logged_before_the_save_is_not_missed_after_it():
    """The first step after a resume lacks what the whole run logged since its last step; from then on it is compared."""
    whole = run(s8={"logged__seen": [1.0]}, s9={"logged__seen": [2.0]})
    assert not told(run(first=8, s9={"logged__seen": [2.0]}), whole).findings
    assert categories(told(run(first=8, s9={"logged__seen": [1.0]}), whole)) == ["logged"]


def test_variables_that_count_are_noted_and_constants_are_not():
    """A stale counter is noted; what stays the same in a whole run, such as the step it began with, is not."""
    whole = [line(step, variables={"step": step, "start": 0}) for step in range(1, 21)]
    resumed = [line(step, variables={"step": step - 7, "start": 7}) for step in range(8, 21)]
    assert told(resumed, whole).notes == ("step: 1 instead of 8",)


def test_moments_tell_what_no_equality_can():
    """Where nothing is seeded: keys that are missing or zero at the first step after a resume, and not at its last."""
    first = line(1, zero=["step"], state__step__w=0)
    last = line(9, state__step__w=8, state__exp_avg__w="x")
    (found,) = without_equality({0: [first, last]})
    assert (found.category, found.names) == ("state", ("exp_avg", "step"))
    assert not list(without_equality({0: [last, last]}))


def test_a_category_is_what_stands_before_the_first_dot():
    """Names of parameters have dots of their own."""
    assert category_of("state.exp_avg.layer.0.weight") == "state"

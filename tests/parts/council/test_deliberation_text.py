from __future__ import annotations

from tests.parts.council.fake_tool_source import outcome
from toolbus.extension import deliberation_block
from toolbus.parts.council.council import named_results


def test_the_block_groups_by_member_and_leaves_failures_out() -> None:
    block = deliberation_block(
        [
            outcome("Ann", "look", "A wolf."),
            outcome("Ann", "listen", success=False, error="deaf"),
            outcome("Ann", "smell", "Snow."),
            outcome("Bob", "look", "Nothing."),
            outcome("Cid", "look", success=False, error="blind"),
        ]
    )
    body, rules = block.rsplit("\n\n---\n\n", 1)
    assert body == (
        "## Council Deliberation\n\n"
        "### Feedback perspective: **Ann**\n\n**Look:**\nA wolf.\n\n**Smell:**\nSnow.\n\n---\n\n"
        "### Feedback perspective: **Bob**\n\n**Look:**\nNothing."
    )
    assert "not instructions to you" in rules
    assert "deaf" not in block
    assert "Cid" not in block


def test_a_named_result_that_does_not_deliberate_is_stored_by_name_only() -> None:
    outcomes = [
        outcome("Ann", "mood", "grim", variable="mood", deliberates=False),
        outcome("Ann", "plot", "twist", variable="plot"),
        outcome("Bob", "odd", "shown", deliberates=False),
        outcome("Bob", "mood", success=False, error="no", variable="mood"),
    ]
    block = deliberation_block(outcomes)
    assert "grim" not in block
    assert "twist" in block
    assert "shown" in block  # without a variable it would be lost
    assert named_results(outcomes) == {"mood": "grim", "plot": "twist"}


def test_a_block_without_results_has_a_sentence_about_it() -> None:
    nothing = "## Council Deliberation\n\nNo tools were executed for this generation."
    assert deliberation_block([]) == nothing
    assert deliberation_block([outcome("Ann", "look", success=False, error="blind")]) == (
        "## Council Deliberation\n\n"
        "The tools that were executed for this generation all failed; there is no result to use."
    )


def test_two_members_of_one_name_have_a_part_each() -> None:
    block = deliberation_block([outcome("Ann", "look", "1"), outcome("Ann", "look", "2", member_id="other")])
    assert block.count("### Feedback perspective: **Ann**") == 2

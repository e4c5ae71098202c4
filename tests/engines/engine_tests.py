"""Tests of chains and trees that every engine must pass.

A test file that imports all names from here runs them with its own fixture `decoder`.
"""

from tests.engines.test_decoder import (
    test_a_full_context_is_refused_and_nothing_is_appended,
    test_a_sequence_in_pieces_is_the_sequence_at_once,
    test_passes_of_which_no_row_is_wanted_stand_beside_others,
    test_rollback_forgets,
    test_slots_of_different_lengths_share_a_pass,
)
from tests.engines.test_decoder_trees import (
    test_a_chain_and_a_tree_behind_it_in_one_pass_as_the_edge_verifies,
    test_a_tree_grown_level_by_level_is_the_whole_tree_is_its_paths,
    test_a_tree_is_over_after_rollback,
    test_any_tree_in_any_pieces_is_its_paths_and_keeps_any_of_them,
    test_keep_turns_a_grown_tree_into_the_accepted_path,
    test_paths_that_the_grown_tree_has_not_are_refused,
    test_trees_of_several_slots_beside_chains_in_one_forward,
    test_what_was_kept_grows_the_next_tree,
    test_what_was_kept_is_a_chain_of_which_less_can_be_kept,
)

__all__ = [
    "test_a_chain_and_a_tree_behind_it_in_one_pass_as_the_edge_verifies",
    "test_a_full_context_is_refused_and_nothing_is_appended",
    "test_a_sequence_in_pieces_is_the_sequence_at_once",
    "test_a_tree_grown_level_by_level_is_the_whole_tree_is_its_paths",
    "test_a_tree_is_over_after_rollback",
    "test_any_tree_in_any_pieces_is_its_paths_and_keeps_any_of_them",
    "test_keep_turns_a_grown_tree_into_the_accepted_path",
    "test_passes_of_which_no_row_is_wanted_stand_beside_others",
    "test_paths_that_the_grown_tree_has_not_are_refused",
    "test_rollback_forgets",
    "test_slots_of_different_lengths_share_a_pass",
    "test_trees_of_several_slots_beside_chains_in_one_forward",
    "test_what_was_kept_grows_the_next_tree",
    "test_what_was_kept_is_a_chain_of_which_less_can_be_kept",
]

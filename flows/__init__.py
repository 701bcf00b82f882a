"""Prefect flows: when and where the stages run. What they depend on is DVC's, what they compute is draftsmith's."""

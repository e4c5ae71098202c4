"""Draft, on either end: windows, drafts ahead, by a model or by repeated text."""

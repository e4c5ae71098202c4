"""Watch a link for a day or a month: a probe and some answers, again and again, in a run file."""

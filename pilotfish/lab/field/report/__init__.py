"""`field report`: read run files, and write one HTML page with plots.

`measured` reads a run, checks it with `plausible` and counts the skipped answers. `figures`,
`hindsight`, `answer_values` and `link_history` compute the results, with `row_times`, `samples` and
`lab.statistics`. `latency_plots`, `plots`, `distribution_plots`, `link_plots`, `quantity_plots`,
`choice_plots` and `choice_times` make plots, the ones over time with `clock_axis`; `canvas` draws
them, if they have enough points, and `pictures` calls them all. `tables` and `link_tables` format
tables. `report_page.write` is the entry point; it fills `template`. Only the modules that draw need
matplotlib.
"""

"""`field report`: read run files, and write one HTML page with plots.

`measured` reads a run, checks it with `plausible` and counts the skipped answers. `figures`,
`hindsight` and `link` compute the results, with `lab.statistics`. `latency_plots`, `plots`,
`timeline` and `choice_plots` draw the results on a `canvas`; `pictures` calls them. `tables`
formats tables. `report_page.write` is the entry point; it fills `template`. Only the modules that
draw need matplotlib.
"""

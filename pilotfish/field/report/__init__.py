"""`field report`: run files in, one HTML page with its plots out.

`measured` reads a run, checks it with `plausible` and counts the answers left out; `figures`,
`hindsight` and `link` compute its figures with `statistics`; `latency_plots`, `plots`, `timeline`
and `choice_plots` draw them on a `canvas`, and `pictures` lists them; `tables` formats tables.
`report_page.write` is the entry point: it fills `template`. Only the modules that draw need
matplotlib.
"""

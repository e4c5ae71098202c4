"""`field report`: run files in, one HTML page with its plots out.

`measured` reads a run, has `plausible` look at it and counts what is left out; `figures`,
`hindsight` and `link` make numbers of its answers, by `statistics`; `latency_plots`, `plots`,
`timeline` and `choice_plots` draw them on a `canvas`, and `pictures` says which there are; `tables`
puts them into cells, and `page` joins it all by `template`. `write` is the way in. What only reads
and counts needs no matplotlib.
"""

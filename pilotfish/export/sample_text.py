"""The text along which an export is compared with its float32: prose, a dialogue, code, figures."""

TEXT = '''\
The harbour had been quiet since the ferries stopped running, and the old lamp at the end of the \
pier was only lit on Sundays. Anna walked out to it all the same, most evenings, with the dog \
ahead of her and the wind behind. She liked to count the boats. There were eleven in spring, nine \
in June, and by the end of the summer, when the nets were hung up to dry along the wall, only six \
of them went out at all.

"You could sell yours," her brother said. "Before it is worth nothing."

"It is worth nothing now," she answered, "so there is no hurry."

Water boils at 100 degrees Celsius at sea level, but at lower temperatures in the mountains, \
because the pressure of the air falls as one climbs: by about one degree for every 300 metres. \
That is why potatoes take longer to cook in La Paz than in Lisbon.

def median(values):
    """Return the middle one of some numbers, or the mean of the two in the middle."""
    if not values:
        raise ValueError("there is no median of nothing")
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2

The function first sorts the list, which takes most of the time, and then looks at its length. If \
the number of values is odd, the one in the middle is the answer. For example, the median of 3, 1 \
and 2 is 2, while the median of 4, 1, 3 and 2 is 2.5.

To install the program, unpack the archive, open a terminal in the new folder, and run the setup \
script. It asks for two things: where the files should go, and whether it may start with the \
computer. Both can be changed later in the settings.
'''

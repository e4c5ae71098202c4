"""The built-in text on which 4-bit weights are calibrated (`export.calibration`).

It is written for this purpose and has what drafters meet: chats, sums, code, prose, lists, data and
other languages. It shares no sentence with the text on which the cost of a precision is measured
(`export.cost`).
"""

from __future__ import annotations

# Questions and answers, which the model reads in its own chat template.
CHATS = (
    (
        "A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf "
        "costs $3. How much money does she take in a day?",
        "In the afternoon the baker sells 24 / 2 = 12 loaves.\nIn total she sells 24 + 12 = 36 "
        "loaves.\nEach loaf costs $3, so she takes 36 * 3 = $108 in a day.\n\nThe answer is 108.",
    ),
    (
        "Explain in simple words why the sky is blue.",
        "Sunlight looks white, but it is a mixture of all colors. When it passes through the air, "
        "it hits tiny molecules of gas. These molecules scatter blue light much more strongly than "
        "red light. So blue light reaches our eyes from every direction, and the whole sky appears "
        "blue. In the evening, sunlight has a longer way through the air, most of the blue is "
        "lost, "
        "and the sky turns orange and red.",
    ),
    (
        "Write a Python function that counts how often each word occurs in a text.",
        "Here is a function that uses a dictionary:\n\n```python\ndef count_words(text):\n    "
        "counts "
        '= {}\n    for word in text.lower().split():\n        word = word.strip(".,;:!?")\n        '
        "if word:\n            counts[word] = counts.get(word, 0) + 1\n    return counts\n```\n\n"
        "The function converts the text to lower case, splits it at spaces and removes "
        "punctuation. "
        "Then it adds 1 to the count of each word. You could also use `collections.Counter`.",
    ),
    (
        "Tom is 4 years older than Mia. In 6 years, the sum of their ages will be 40. How old is "
        "Mia now?",
        "Let Mia's age be m. Then Tom's age is m + 4.\nIn 6 years Mia will be m + 6 and Tom will "
        "be "
        "m + 10.\nThe sum is (m + 6) + (m + 10) = 2m + 16 = 40.\nSo 2m = 24 and m = 12.\n\nMia is "
        "12 years old now.",
    ),
    (
        "What should I pack for a weekend in the mountains?",
        "Here are some things you should pack:\n\n1. **Clothes**: a warm jacket, a rain coat, two "
        "pairs of socks and good boots.\n2. **Food and water**: at least two liters of water per "
        "day, bread, cheese, nuts and fruit.\n3. **Safety**: a map, a flashlight, a first aid kit "
        "and a charged phone.\n4. **Sun**: a hat, sunglasses and sunscreen.\n\nCheck the weather "
        "forecast before you leave, and tell someone which way you plan to go.",
    ),
)
# Further text, which the model reads as it is.
PLAIN = '''\
The history of the canal begins in 1794, when a group of merchants asked the king for permission \
to connect the two rivers. The work was expected to take five years and took nineteen. Most of the \
diggers came from the north of the country, and many of them stayed: even today, about a third of \
the families in the valley have northern names. By 1850 the canal carried coal, grain and timber, \
and the towns along its banks had more than doubled in size. The railway ended all that. In 1911 \
the last barge left the upper lock, and for sixty years nobody cared for the water.

class Stack:
    """A list of items of which only the last can be removed."""

    def __init__(self, limit=100):
        self.items = []
        self.limit = limit

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError(f"the stack has {self.limit} items already")
        self.items.append(item)

    def pop(self):
        return self.items.pop() if self.items else None

for (let i = 0; i < rows.length; i++) {
  const { id, name, price } = rows[i];
  if (price > 0 && !seen.has(id)) total += price * 1.19;
}

{"order": 20417, "customer": {"name": "R. Okafor", "city": "Leeds"}, "items": [{"sku": "A-113", \
"count": 2, "price": 14.5}, {"sku": "B-020", "count": 1, "price": 7.25}], "paid": true}

SELECT city, COUNT(*) AS people, AVG(age) FROM person WHERE born > 1970 GROUP BY city ORDER BY \
people;

Die Brücke war seit dem Morgen gesperrt, und niemand wusste, wann sie wieder geöffnet würde. La \
réunion commence à neuf heures, mais il vaut mieux arriver un peu plus tôt. El tren de las ocho \
llegó tarde porque había nevado toda la noche. 今天的天气很好，我们一起去公园散步吧。

The area of a circle with radius r is \\(A = \\pi r^2\\), and its circumference is \\(2 \\pi \
r\\). If the radius grows from 3 cm to 6 cm, the area grows from about 28.27 to about 113.1 square \
centimeters, that is, by a factor of 4. In general, if all lengths are multiplied by k, then areas \
are multiplied by k^2 and volumes by k^3. This explains why a large animal needs relatively less \
food than a small one: its surface, through which it loses heat, grows more slowly than its mass.

"Did you remember to call the doctor?" she asked without looking up from her book. "I did," he \
said, "but they were closed." He put the kettle on the stove and waited. Outside, a car stopped, \
a door was closed, and somebody laughed. "They will be open on Thursday, from ten until half \
past four."
'''

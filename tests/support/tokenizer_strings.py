"""1,000 strings for comparing tokenizers, the same on every machine and version of Python.

Code, prose in several scripts, digits, CJK, emoji, odd white space, and mixtures of all of them.
"""

from __future__ import annotations

import random

CODE = (
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i] >> 3;\r\n}\r\n",
    "SELECT * FROM t WHERE id IN (1, 2, 3) AND name LIKE '%o''brien%';",
    "const f = async ({a, b}) => { await g(`${a}/${b}`); };",
    "#include <vector>\ntemplate<typename T> struct S { T* p = nullptr; };",
    '{"key": [1.5e-10, null, true], "nested": {"a\\n": "\\u00e9"}}',
    "<div class=\"x-y\" id='z'>&nbsp;&amp;</div><!-- note -->",
    "git commit -m 'fix: #123' && ./run.sh --flag=0x1F | tee /tmp/log.txt 2>&1",
    "$$\\frac{\\partial f}{\\partial x_1} \\leq \\sum_{i=0}^{n} \\alpha_i$$",
    "I'm you've WE'LL they'd it's DON'T 'tis o'clock 'S 'T 'Re",
)
PROSE = (
    "The quick brown fox jumps over the lazy dog.",
    "Größe, Straße, naïve café — déjà vu… “quoted” ‘single’ «guillemets»",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "Pchnąć w tę łódź jeża lub ośm skrzyń fig",
    "Türkçe İIıi ŞşĞğ, ﬁ ﬂ ligatures, Å Å (two forms), e\u0301 decomposed",
    "Zażółć gęślą jaźń; hyphen-ated, under_scored, CamelCaseWord, ALLCAPS",
)
DIGITS = (
    "0",
    "7",
    "42",
    "1234567890",
    "3.14159265",
    "1,234,567.89",
    "2026-11-21T01:17:36Z",
    "0x1F4A9",
    "+49 (0)30 901820",
    "1e-10",
    "٠١٢٣٤٥٦٧٨٩",
    "１２３４５",
    "½ ⅓ ²³ ①②③ Ⅷ",
    "v1.2.3-rc4",
    "100%",
    "१२३४",
    "000000",
    "12 34  56   78",
)
CJK = (
    "敏捷的棕色狐狸跳过了懒狗。",
    "繁體中文測試，標點「引號」",
    "いろはにほへと ちりぬるを",
    "カタカナ・ﾊﾝｶｸ",
    "다람쥐 헌 쳇바퀴에 타고파",
    "漢字とかなのmixed文",
    "𠮷野家 𡈽 𩸽",
    "？！；：，。",
    "第3章　第4節",
)
EMOJI = (
    "😀",
    "🐟🦈",
    "👩‍👩‍👧‍👦",
    "🇩🇪🇯🇵",
    "👍🏽",
    "❤️",
    "☕︎",
    "1️⃣",
    "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "🙂text🙃",
    "✅ done",
    "→ ⇒ ∀x∃y ≠ ∞",
)
SPACE = (
    " ",
    "  ",
    "   ",
    "     ",
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\r",
    " \n",
    "\n ",
    "\n  \n",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
    "\ufeff",
    "\u2028",
    "\x0b",
    "\x0c",
    "\x85",
    " \t \n",
    "\u202f",
)
ODD = (
    "\x00",
    "\x01\x1f",
    "\x7f",
    "\ufffd",
    "\u0300",
    "\u200d",
    "\ue000",
    "\U0010ffff",
    "|",
    "<|",
    "|>",
    "###",
    "...",
    "!!!???",
    "--",
    "==>",
    "__init__",
    "@user",
    "https://a.b/c?d=e&f#g",
    "a@b.cd",
    "C:\\Temp\\x",
    "<|im_start|>user\n",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|",
    "½",
    "Ġ",
    "Ċ",
    "▁",
    "<0x0A>",
    "Ã©",
    "'",
    '"',
    "''",
    "´",
    "`",
    "^~^",
    "\\",
    "/",
    "//",
)
WORDS = (
    "the",
    " of",
    " and",
    "Hello",
    " world",
    "transformer",
    " antidisestablishmentarianism",
    "xyzzy",
    " I",
    "'ll",
    "n't",
    " a",
    "A",
    "Zürich",
    " naïve",
    "日本",
    " 中",
    "мир",
    "x",
    " y",
    "Z",
)
POOLS = (CODE, PROSE, DIGITS, CJK, EMOJI, SPACE, ODD, WORDS)


def make_strings(count: int = 1000, seed: int = 7) -> list[str]:
    """Make `count` strings: first every piece alone, then random mixtures of 2 to 12 pieces.

    Only `Random.random` is used, since Python promises never to change its stream.
    """
    rng = random.Random(seed)

    def below(n: int) -> int:
        return int(rng.random() * n)

    strings = [piece for pool in POOLS for piece in pool]
    while len(strings) < count:
        pools = POOLS if below(3) else (POOLS[below(len(POOLS))], SPACE, WORDS)
        chosen = []
        for _ in range(2 + below(11)):
            pool = pools[below(len(pools))]
            piece = pool[below(len(pool))]
            # Sometimes a part only, so that words and code break at odd places.
            chosen.append(piece if below(4) else piece[below(len(piece)) :])
        strings.append("".join(chosen))
    return strings[:count]

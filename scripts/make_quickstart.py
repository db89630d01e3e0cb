#!/usr/bin/env python3
"""Make the quickstart chats: short arithmetic word problems and facts, as chat rows.

    python3 scripts/make_quickstart.py                                   # configs/quickstart.jsonl
    python3 scripts/make_quickstart.py --seed 1 --count 5000 --out FILE  # other chats from the same generator

Each line of the output is {"messages": [{"role", "content"}, ...]}. The same seed and count give the same bytes.
The quickstart's seed (QUICKSTART_SEED) is held out: scripts/train_teacher.py trains on other seeds and drops every
chat whose opening user turn also opens a quickstart chat.

How a chat comes about: a family draws its numbers and tells a story (`Problem`), a style decides how the assistant
answers (worked lines, numbered steps, one sentence, the bare number), an optional system turn asks for that style,
and follow-ups continue some chats for one or two more turns. Only the standard library is used.
"""
import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

QUICKSTART_SEED = 20
QUICKSTART_COUNT = 300
QUICKSTART_PATH = Path(__file__).resolve().parent.parent / "configs" / "quickstart.jsonl"


# ---- wording ---------------------------------------------------------------------------------------------------

PEOPLE = [tuple(p.split()) for p in (
    "Anouk she her", "Bram he his", "Zoë she her", "José he his", "Ingrid she her", "Tariq he his", "Anaïs she her",
    "Søren he his", "Łucja she her", "Kofi he his", "Renée she her", "Matteo he his", "Μαρία she her", "Νίκος he his",
    "美咲 she her", "Dmitri he his", "Priya she her", "Oskar he his", "Leila she her", "Yusuf he his", "Saoirse she her",
    "Elif she her", "Jonas he his", "Chiara she her", "Tomáš he his", "Imani she her", "Pavel he his", "Noor she her",
    "Emil he his", "Greta she her", "Rafael he his", "Wanjiru she her", "Henrik he his", "Beatriz she her", "Ravi he his",
    "Freya she her", "Malik he his", "Odile she her", "Günther he his", "Hana she her", "Lars he his", "Nomvula she her",
    "Piotr he his", "Selma she her", "Andrés he his", "Yara she her", "Viktor he his", "Linnea she her", "Amadou he his",
)]
TOWNS = "Gent|Porto|Kraków|Málaga|Turku|Graz|Lyon|Bergen|Győr|Leeds|Cork|Pécs|Nantes|Αθήνα|Basel|Aarhus".split("|")
FRUIT = "plums|pears|apricots|figs|quinces|lemons|cherries|peaches|olives|walnuts|chestnuts|radishes|leeks".split("|")
BAKES = "buns|rye rolls|scones|éclairs|crêpes|pretzels|tarts|cinnamon twists|muffins|flapjacks|brioches".split("|")
TOYS = "marbles|stickers|trading cards|foreign coins|sea shells|badges|stamps|postcards|puzzle pieces|buttons".split("|")
GOODS = "lamp|rucksack|kettle|scarf|tent|violin case|bicycle helmet|rain jacket|chess set|coffee mill|globe|camera".split("|")
PLANTS = "tulips|tomato plants|lavender bushes|cabbages|sunflowers|strawberry plants|bean poles|rose cuttings".split("|")
PLACES = "café|library|bakery|workshop|school|museum|harbour office|bike shop|market stall|theatre|nursery".split("|")
ASIDES = (
    "The weather is [mild|windy|grey] that day.", "The radio plays in the background.", "It is a [quiet|busy] {day}.",
    "{name} wears a [red|blue|green] coat.", "The nearest tram stop is {some} minutes away.", "A cat sleeps by the door.",
    "{name} has {some} cousins.", "Lunch is at half past twelve.", "The shop opened {some} years ago.",
)
DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday".split("|")
EMOJI = "🙂|🎉|👍|🍐|🚲|🌷|📚|⭐".split("|")


def choose(rng, template):
    """Resolve every [a|b|c] in the template to one of its alternatives, innermost first."""
    while (m := re.search(r"\[([^\[\]]*)\]", template)):
        template = template[:m.start()] + rng.choice(m[1].split("|")) + template[m.end():]
    return template


def capital(text):
    return text[:1].upper() + text[1:]


@dataclass
class Problem:
    """A word problem: what is asked, one sentence per step of the solution, the number, and what it counts."""
    question: str
    steps: list
    answer: int
    unit: str            # "plums"; a currency sign is written before the number instead

    def amount(self):
        return f"{self.unit}{self.answer}" if self.unit in "€$£" else f"{self.answer} {self.unit}"


class Teller:
    """Draws people, words and numbers for one chat, and fills them into templates."""

    def __init__(self, rng):
        self.rng = rng
        (self.name, self.they, self.their), (self.friend, self.friend_they, _) = rng.sample(PEOPLE, 2)
        self.words = dict(
            name=self.name, they=self.they, their=self.their, They=capital(self.they), friend=self.friend,
            place=rng.choice(PLACES), town=rng.choice(TOWNS), day=rng.choice(DAYS), cur=rng.choice("€€€$$£"),
            fruit=rng.choice(FRUIT), bakes=rng.choice(BAKES), toys=rng.choice(TOYS), goods=rng.choice(GOODS),
            plants=rng.choice(PLANTS), x=rng.choice(["*", "x", "×"]), some=rng.randrange(3, 30))

    def num(self, low, high, step=1):
        return self.rng.randrange(low, high + 1, step)

    def say(self, template, **numbers):
        return choose(self.rng, template).format(**{**self.words, **numbers})

    def problem(self, story, ask, steps, answer, unit, **numbers):
        """Story sentences, now and then with an aside among them or the question first, then the steps."""
        told = [self.say(s, **numbers) for s in story]
        if self.rng.random() < 0.25:
            told.insert(self.rng.randrange(1, len(told) + 1), self.say(self.rng.choice(ASIDES)))
        question = " ".join(told + [self.say(ask, **numbers)])
        return Problem(question, [self.say(s, **numbers) for s in steps], answer, self.say(unit))


# ---- families of problems ----------------------------------------------------------------------------------------

def harvest(t):
    a, b, gift, per = t.num(12, 90), t.num(8, 70), t.num(3, 18), t.num(3, 9)
    bags = (a + b - gift) // per
    gift = a + b - bags * per
    return t.problem(
        ["[{name} picks|In the morning {name} picks|On {day}, {name} gathers] {a} {fruit} [in the orchard|behind the house|near {town}].",
         "[Later|After a rest|In the afternoon] {they} [finds|picks|gathers] {b} more[, and {friend} gets {gift} of them all| and hands {gift} to {friend}].",
         "[The rest go into bags of {per}.|What is left is packed {per} to a bag.]"],
        "How many bags [does {name} fill|are filled|are there]?",
        ["[In all|Altogether] {name} has {a} + {b} = {s} {fruit}.", "[After the gift|Without {friend}'s share] {s} - {gift} = {left} remain.",
         "[They fill|That makes] {left} / {per} = {bags} bags."],
        bags, "bags", a=a, b=b, gift=gift, per=per, s=a + b, left=a + b - gift, bags=bags)


def tickets(t):
    adults, kids, pa, pk = t.num(2, 6), t.num(2, 9), t.num(6, 19), t.num(2, 5)
    cost = adults * pa + kids * pk
    note = (cost // 50 + 1) * 50
    return t.problem(
        ["[A group|A family|{name}'s choir] of {adults} adults and {kids} children [takes the train to {town}|visits the {place} in {town}|goes to a puppet show].",
         "[An adult ticket costs {cur}{pa} and a child pays {cur}{pk}.|Adults pay {cur}{pa} each, children {cur}{pk} each.]",
         "{name} [pays|hands over] {cur}{note}."],
        "[How much change is due?|What change does {they} get back?|How much comes back?]",
        ["The adults [pay|cost] {adults} {x} {pa} = {cur}{ca}.", "The children [pay|cost] {kids} {x} {pk} = {cur}{ck}.",
         "[Together|In total] that is {ca} + {ck} = {cur}{cost}.", "The change is {note} - {cost} = {cur}{change}."],
        note - cost, "{cur}", adults=adults, kids=kids, pa=pa, pk=pk, note=note, ca=adults * pa, ck=kids * pk, cost=cost,
        change=note - cost)


def tank(t):
    rate, leak, minutes, start = t.num(7, 25), t.num(1, 5), t.num(4, 30), t.num(0, 60, 5)
    return t.problem(
        ["A [rain barrel|water tank|fish pond] [behind the {place}|in {town}] [holds|starts with] {start} litres.",
         "A [hose|pump|tap] adds {rate} litres [a minute|every minute], [but a crack loses {leak} litres in the same time|while {leak} litres a minute leak out]."],
        "[How many litres are in it|How much water does it hold] after {minutes} minutes?",
        ["[Each minute|Every minute] the level [grows|rises] by {rate} - {leak} = {net} litres.",
         "In {minutes} minutes that [is|adds] {minutes} {x} {net} = {gain} litres.", "[With the {start} litres at the start:|Now add the start:] {start} + {gain} = {end}."],
        start + minutes * (rate - leak), "litres", rate=rate, leak=leak, minutes=minutes, start=start, net=rate - leak,
        gain=minutes * (rate - leak), end=start + minutes * (rate - leak))


def ride(t):
    v1, h1, v2, h2 = t.num(11, 24), t.num(1, 4), t.num(4, 7), t.num(1, 3)
    return t.problem(
        ["[{name} cycles|On {day} {name} cycles] at {v1} km an hour for {h1} h [towards {town}|along the canal|over the hills].",
         "[Then|After a puncture] {they} walks for {h2} h at {v2} km an hour."],
        "How [far does {they} get|many kilometres is that] in all?",
        ["[On the bicycle|By bike]: {h1} {x} {v1} = {d1} km.", "On foot: {h2} {x} {v2} = {d2} km.", "[Together|The sum is] {d1} + {d2} = {d} km."],
        v1 * h1 + v2 * h2, "km", v1=v1, h1=h1, v2=v2, h2=h2, d1=v1 * h1, d2=v2 * h2, d=v1 * h1 + v2 * h2)


def bakery(t):
    trays, per, unsold, price = t.num(3, 14), t.num(6, 24), t.num(2, 17), t.num(2, 6)
    sold = trays * per - unsold
    return t.problem(
        ["[{name} bakes|A baker in {town} makes|The {place} orders] {trays} trays of {bakes}, {per} on [each tray|every one].",
         "[At closing time|In the evening] {unsold} are [left over|still there|unsold].", "[Each one sells for|They cost] {cur}{price}[| apiece]."],
        "[How much money came in?|What were the takings?|How much was earned?]",
        ["[There were|That makes] {trays} {x} {per} = {made} {bakes}.", "[Sold|Customers bought]: {made} - {unsold} = {sold}.",
         "[The takings are|So] {sold} {x} {price} = {cur}{money}."],
        sold * price, "{cur}", trays=trays, per=per, unsold=unsold, price=price, made=trays * per, sold=sold, money=sold * price)


def reading(t):
    per, days, more, rest = t.num(8, 35), t.num(3, 9), t.num(2, 12), t.num(3, 9)
    left = rest * (per + more)
    pages = per * days + left
    return t.problem(
        ["{name} [reads|is reading] a [novel|book about bridges|book of Greek myths|detective story] [of|with] {pages} pages.",
         "[For {days} days {they} reads {per} pages a day|{They} manages {per} pages a day for {days} days].",
         "[From then on {they} reads {more} pages more each day.|After that {they} adds {more} pages to the daily amount.]"],
        "How many [further|more] days [will it take|does {they} need] to finish?",
        ["[So far|In {days} days] {they} has read {days} {x} {per} = {done} pages.", "[Left|Still to read]: {pages} - {done} = {left} pages.",
         "The new pace is {per} + {more} = {pace} pages a day.", "[That takes|It takes] {left} / {pace} = {rest} days."],
        rest, "days", pages=pages, per=per, days=days, more=more, done=per * days, left=left, pace=per + more, rest=rest)


def savings(t):
    per, weeks, has, gift = t.num(4, 30), t.num(3, 16), t.num(5, 60), t.num(5, 25)
    price = has + gift + per * weeks
    return t.problem(
        ["{name} [wants|would like] a {goods} that costs {cur}{price}.", "{They} [has|already has] {cur}{has} and [gets {cur}{gift} from|is given {cur}{gift} by] {friend}.",
         "[Each week|Every week] {they} [puts aside|saves] {cur}{per}."],
        "[After how many weeks can {they} buy it?|How many weeks must {they} save?]",
        ["[{name} now has|Together that is] {has} + {gift} = {cur}{sum}.", "[Missing|Still needed]: {price} - {sum} = {cur}{gap}.", "{gap} / {per} = {weeks} weeks."],
        weeks, "weeks", per=per, weeks=weeks, has=has, gift=gift, price=price, sum=has + gift, gap=per * weeks)


def garden(t):
    rows, per, part = t.num(4, 12), t.num(5, 20), t.rng.choice([2, 3, 4, 5])
    total = rows * per
    total -= total % part
    extra = rows * per - total
    lost = total // part
    word = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}[part]
    head = ["There are {rows} {x} {per} = {all} {plants}."] + (["[Given away|To {friend}]: {all} - {extra} = {total}."] if extra else [])
    gift = ["{They} gives {extra} of them to {friend}."] if extra else []
    return t.problem(
        ["[{name} plants|The gardener of the {place} plants|In {town}, {name} plants] {rows} rows of {per} {plants}."] + gift
        + [f"[A late frost kills|Snails eat|A storm ruins] {word} of [them|the plants]."],
        "How many {plants} [survive|are left|are still standing]?",
        head + ["[The loss is|Lost]: {total} / {part} = {lost}.", "[Left|Remaining]: {total} - {lost} = {left}."],
        total - lost, "{plants}", rows=rows, per=per, all=rows * per, extra=extra, total=total, part=part, lost=lost, left=total - lost)


def ages(t):
    young, gap, years = t.num(3, 30), t.num(2, 28), t.num(2, 15)
    return t.problem(
        ["{name} is {young} years old[|, and today is {their} birthday].", "{friend} is {gap} years older."],
        "[How old will they be together in {years} years?|What is the sum of their ages {years} years from now?]",
        ["[Today {friend} is|{friend} is] {young} + {gap} = {old}.", "In {years} years {name} [is|will be] {young} + {years} = {y2} and {friend} {old} + {years} = {o2}.",
         "[The sum is|Together]: {y2} + {o2} = {sum}."],
        2 * young + gap + 2 * years, "years", young=young, gap=gap, years=years, old=young + gap, y2=young + years,
        o2=young + gap + years, sum=2 * young + gap + 2 * years)


def discount(t):
    price, off, n = t.num(20, 300, 20), t.num(5, 60, 5), t.num(2, 5)
    cut = price * off // 100
    return t.problem(
        ["[A {goods}|At the {place} a {goods}] costs {cur}{price}.", "[In the sale|On {day}|This week] the price [drops|is cut] by {off}%."],
        "[What do {n} of them cost then?|How much must {name} pay for {n}?]",
        ["[The cut is|{off}% of {price} is] {price} {x} {off} / 100 = {cur}{cut}.", "[One costs|The new price is] {price} - {cut} = {cur}{new}.", "[For {n}|All {n}]: {n} {x} {new} = {cur}{all}."],
        n * (price - cut), "{cur}", price=price, off=off, n=n, cut=cut, new=price - cut, all=n * (price - cut))


def recipe(t):
    base, grams, guests = t.num(2, 6), t.num(30, 150, 10), t.num(2, 9)
    what = t.rng.choice(["flour", "rice", "crème fraîche", "couscous", "grated cheese", "φέτα", "oat flakes"])
    return t.problem(
        [f"[A recipe|{{name}}'s soup|A pie] for {{base}} people [needs|takes] {{all}} g of {what}.", "{name} [expects|invites|cooks for] {people} [people|guests]."],
        f"How many grams of {what} [are needed|does {{they}} need]?",
        ["[For one person|Per person]: {all} / {base} = {grams} g.", "For {people}: {people} {x} {grams} = {total} g."],
        grams * (base + guests), "g", base=base, all=base * grams, grams=grams, people=base + guests, total=grams * (base + guests))


def rope(t):
    piece, count, rest = t.num(4, 19), t.num(4, 20), t.num(1, 3)
    return t.problem(
        ["[{name} has|There is] a [rope|ribbon|roll of wire] of {long} m.", "[{name} cuts it|It is cut] into pieces of {piece} m[|, as many as possible]."],
        "How many metres are left [over|at the end]?",
        ["{piece} goes into {long} {count} times: {count} {x} {piece} = {used}.", "[The rest is|What is left]: {long} - {used} = {rest} m."],
        rest, "m", long=piece * count + rest, piece=piece, count=count, used=piece * count, rest=rest)


def wages(t):
    rate, hours, days, bonus = t.num(11, 28), t.num(3, 8), t.num(2, 6), t.num(10, 90, 5)
    return t.problem(
        ["{name} [works|has a job] at a {place} [in {town}|near the station] and earns {cur}{rate} an hour.", "[This week|Last week] {they} worked {days} days, {hours} hours [each|a day].",
         "[There was a bonus of {cur}{bonus}.|{They} also got {cur}{bonus} in tips.|With the night shift came {cur}{bonus} extra.]"],
        "How much [did {they} earn|was that in total]?",
        ["[Hours worked|Time]: {days} {x} {hours} = {h} h.", "[Pay|Wages]: {h} {x} {rate} = {cur}{pay}.", "With the [bonus|extra] {pay} + {bonus} = {cur}{sum}."],
        rate * hours * days + bonus, "{cur}", rate=rate, hours=hours, days=days, bonus=bonus, h=hours * days, pay=rate * hours * days,
        sum=rate * hours * days + bonus)


def collection(t):
    a, times = t.num(6, 40), t.num(2, 5)
    swap = t.num(1, a * (times - 1) // 2)
    return t.problem(
        ["{name} [owns|has] {a} {toys}.", "{friend} has {times} times as many.", "[Then|At the {place}|On {day}] {friend} [gives|sells] {swap} of [them|these] to {name}."],
        "How many [more does {friend} have than {name} now|{toys} is {friend} ahead by now]?",
        ["{friend} [has|starts with] {times} {x} {a} = {b}.", "Then {friend} has {b} - {swap} = {b2} and {name} {a} + {swap} = {a2}.", "The difference is {b2} - {a2} = {d}."],
        times * a - a - 2 * swap, "{toys}", a=a, times=times, swap=swap, b=times * a, b2=times * a - swap, a2=a + swap,
        d=times * a - a - 2 * swap)


def battery(t):
    start, drop, hours, later = t.num(70, 100), t.num(3, 9), t.num(2, 6), t.num(1, 3)
    return t.problem(
        ["[{name}'s phone|The lamp of the tent|A small robot] [is at|starts at] {start}% charge.", "It loses {drop}% an hour [in use|when it runs] and {later}% an hour [in standby|when idle]."],
        "[How full is it|What does it show] after {hours} hours of use and {hours} hours [idle|in standby]?",
        ["In use: {hours} {x} {drop} = {u}.", "Idle: {hours} {x} {later} = {i}.", "[Left|So it shows]: {start} - {u} - {i} = {end}."],
        start - hours * (drop + later), "percent", start=start, drop=drop, later=later, hours=hours, u=hours * drop, i=hours * later,
        end=start - hours * (drop + later))


def average(t):
    mean = t.num(8, 60)
    a, b = t.num(1, mean), t.num(1, mean // 2 + 1)
    parts = [mean - a + b, mean + a, mean - b]
    t.rng.shuffle(parts)
    p, q, r = parts
    return t.problem(
        ["[In three games|On three days|In three rounds] {name} [scores|gets|collects] {p}, {q} and {r} points."],
        "What is the [mean|average][| score]?",
        ["The sum is {p} + {q} + {r} = {s}.", "[Divide by 3|The mean is]: {s} / 3 = {mean}."], mean, "points", p=p, q=q, r=r, s=p + q + r, mean=mean)


def field(t):
    w, l, gate, price = t.num(4, 25), t.num(5, 40), t.num(1, 4), t.num(3, 15)
    fence = 2 * (w + l) - gate
    return t.problem(
        ["A [meadow|playground|sheep pen] [near {town}|owned by {name}] is {l} m long and {w} m wide.", "{name} [fences it|puts a fence round it], [but leaves|leaving] {gate} m for a gate.",
         "[A metre of fence costs {cur}{price}.|Fence is sold at {cur}{price} a metre.]"],
        "[What does the fence cost?|How much is the fence?]",
        ["[All round|The perimeter is] 2 {x} ({l} + {w}) = {p} m.", "Without the gate {p} - {gate} = {f} m.", "[Cost|Price]: {f} {x} {price} = {cur}{c}."],
        fence * price, "{cur}", w=w, l=l, gate=gate, price=price, p=2 * (w + l), f=fence, c=fence * price)


def paint(t):
    a, b, k = t.num(1, 5), t.num(2, 7), t.num(2, 12)
    c1, c2 = t.rng.sample(["blue", "white", "yellow", "ochre", "red", "grey"], 2)
    return t.problem(
        [f"[{{name}} mixes|For the {{place}} {{name}} mixes] {c1} and {c2} paint in the ratio {{a}} : {{b}}.", "{They} [needs|wants] {total} litres [of the mixture|in all]."],
        f"How many litres of {c2}[| paint] [does that take|are in it|go in]?",
        ["[One round|The ratio] has {a} + {b} = {p} parts.", "[A part is|Each part is] {total} / {p} = {k} litres.", f"[So the {c2} is|{capital(c2)}:] {{b}} {{x}} {{k}} = {{r}} litres."],
        b * k, "litres", a=a, b=b, k=k, total=(a + b) * k, p=a + b, r=b * k)


def crowd(t):
    groups, per, absent, team = t.num(3, 9), t.num(9, 28), t.num(2, 12), t.num(3, 8)
    there = groups * per - absent
    absent += there % team
    there = groups * per - absent
    return t.problem(
        ["[{groups} classes of {per} pupils|{groups} clubs with {per} members each] [meet|come] [in {town}|at the {place}|for a sports day].", "[{absent} of them|Of these, {absent}] [are ill|stay at home|miss the bus].",
         "[The others|Those who came] form teams of {team}."],
        "How many teams [are there|do they make|play]?",
        ["[Expected|Enrolled]: {groups} {x} {per} = {all}.", "[Present|There]: {all} - {absent} = {there}.", "Teams: {there} / {team} = {n_teams}."],
        there // team, "teams", groups=groups, per=per, absent=absent, team=team, all=groups * per, there=there, n_teams=there // team)


FAMILIES = [harvest, tickets, tank, ride, bakery, reading, savings, garden, ages, discount, recipe, rope, wages, collection,
            battery, average, field, paint, crowd]


# ---- short questions ---------------------------------------------------------------------------------------------

UNITS = ["zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen".split(), "- - twenty thirty forty fifty sixty seventy eighty ninety".split()]
FACTS = [tuple(f.split("=")) for f in (
    "How many legs does a spider have=8", "How many sides does a hexagon have=6", "How many minutes are in a day=1440",
    "How many strings does a violin have=4", "What is the Greek word for water=νερό", "What is the French word for summer=été",
    "What is the Japanese word for mountain=山", "What is the Chinese character for water=水", "Which planet is nearest to the sun=Mercury",
    "What is the chemical symbol of iron=Fe", "What is the chemical symbol of gold=Au", "How many bits are in a byte=8",
    "What is the smallest prime number=2", "How many hours are in a week=168", "Which letter is π in the Greek alphabet=the sixteenth",
    "How many degrees has a right angle=90", "What is the capital of Portugal=Lisbon", "What is the capital of Finland=Helsinki",
    "What is the capital of Greece=Athens", "What is the capital of Japan=Tokyo", "What is the capital of Ireland=Dublin",
    "What colour do blue and yellow make=green", "How many edges does a cube have=12", "What is the German word for bridge=Brücke",
    "What is the Spanish word for tomorrow=mañana", "How many weeks are in a year=about 52", "How many centimetres are in a metre=100",
    "At how many °C does water freeze=0", "At how many °C does water boil at sea level=100", "How many months have 31 days=7",
    "What is the Roman numeral for fifty=L", "How many players does a football team field=11", "What is the Polish word for thank you=dziękuję",
    "What do bees make=honey", "Which season follows autumn=winter", "What is the opposite of even=odd", "How many cents are in a euro=100")]


def in_words(n):
    if n < 20:
        return UNITS[0][n]
    if n < 100:
        return UNITS[1][n // 10] + ("-" + UNITS[0][n % 10] if n % 10 else "")
    if n < 1000:
        return UNITS[0][n // 100] + " hundred" + (" and " + in_words(n % 100) if n % 100 else "")
    return in_words(n // 1000) + " thousand" + (" " + in_words(n % 1000) if n % 1000 else "")


def fact(t):
    question, answer = t.rng.choice(FACTS)
    return (t.say("[" + question + "?|Quick question: " + question[0].lower() + question[1:] + "?|" + question + ", please?]"),
            t.say("[" + answer + "|It is " + answer + ".|The answer is " + answer + ".]"))


def small_sum(t):
    a, b, c = t.num(2, 99), t.num(2, 60), t.num(2, 12)
    expression, value = t.rng.choice([(f"{a} + {b}", a + b), (f"{a + b} - {b}", a), (f"{b} {t.words['x']} {c}", b * c),
                                      (f"{b * c} / {c}", b), (f"{a} + {b} {t.words['x']} {c}", a + b * c), (f"{c}²", c * c)])
    return (t.say("[What is {e}?|{e} = ?|Work out {e}.|Compute {e}, please.|{name} asks: what is {e}?]", e=expression),
            t.say("[{v}|{e} = {v}|That is {v}.|{e} = {v}.]", e=expression, v=value))


def spelled(t):
    n = t.num(1, 9999) if t.rng.random() < 0.5 else t.num(1, 130)
    return t.say("[Write {v} in words.|How do you spell the number {v}?|{v} in words, please.]", v=n), capital(in_words(n)) + "."


def comparison(t):
    a, b = t.num(2, 400), t.num(2, 400)
    sign = "<" if a < b else ">" if a > b else "="
    return (t.say("[Which is larger, {a} or {b}?|Compare {a} and {b}.]", a=a, b=b),
            t.say("[{a} {s} {b}|The larger one is {m}, since {a} {s} {b}.]", a=a, b=b, s=sign, m=max(a, b)))


# ---- chats -------------------------------------------------------------------------------------------------------

STYLES = {
    "lines": ("[Solve the problem step by step and close with a line #### and the number.|You are a patient tutor. Work in short lines; "
              "the last line is #### N.|Show each step, then the result after ####.]"),
    "numbered": "[Number your steps.|Answer with a numbered list and a final line that starts with Answer.|You explain things in numbered steps.]",
    "sentence": "[Answer in one sentence.|Be brief: one sentence is enough.]",
    "bare": "[Reply with the number only.|Only the result, no working.|Give the bare number.]",
}
GENERAL_SYSTEM = "[You are a helpful assistant.|You are a friendly maths tutor at a {place} in {town}.|You help pupils with their homework.|Be exact and kind.]"


def answer_in(style, problem, t):
    last = problem.steps[-1]
    if style == "lines":
        return "\n".join(problem.steps + [f"#### {problem.answer}"])
    if style == "numbered":
        return "\n".join([f"{i}. {s}" for i, s in enumerate(problem.steps, 1)] + [f"Answer: {problem.amount()}"])
    if style == "sentence":
        return t.say("[It is {amount}, because {last}|The answer is {amount}: {last}|{amount}, since {last}]", amount=problem.amount(), last=last)
    return str(problem.answer)


def follow_up(problem, style, t):
    """A further user turn about the problem and its answer."""
    n = problem.answer
    d = t.rng.choice([d for d in (2, 3, 4, 5, 6, 7, 8, 9, 1) if n % d == 0 and (d > 1 or n < 2 or t.rng.random() < 0.2)] or [1])
    m = t.num(2, 9)
    kind = t.rng.choice("double share words sure thanks why more".split())
    if kind == "double":
        return (t.say("[What is {m} times that?|And {m} times as much?|Multiply that by {m}, please.]", m=m),
                t.say("[{n} {x} {m} = {v}|That would be {v}.|{v}]", n=n, m=m, v=n * m))
    if kind == "share" and d > 1:
        return (t.say("[If {d} people share that, what does each get?|Split it between {d}, please.|And a share, if {friend} divides it by {d}?]", d=d),
                t.say("[Each gets {v}.|{n} / {d} = {v}|A share is {v}.]", d=d, n=n, v=n // d))
    if kind == "words" and n < 10000:
        return t.say("[Write that in words.|Can you spell the number out?|In words, please.]"), capital(in_words(n)) + "."
    if kind == "sure":
        return t.say("[Are you sure?|Is that right?|Please check it.]"), t.say("[Yes. {last}|Yes: {last}|I checked it. {last}]", last=problem.steps[-1])
    if kind == "why" and style in ("bare", "sentence"):
        return t.say("[How did you get that?|Why?|Show the steps, please.]"), answer_in("lines", problem, t)
    if kind == "more":
        return (t.say("[And with {m} more?|What if {m} are added?]", m=m), t.say("[Then it is {n} + {m} = {v}.|{v}]", n=n, m=m, v=n + m))
    smile = t.rng.choice(EMOJI)
    return (t.say("[Thanks!|Thank you {smile}|Great, thanks {smile}|Merci !|Danke schön!]", smile=smile),
            t.say("[You are welcome!|You are welcome {smile}|Any time.|Avec plaisir !|Gladly. Another one?]", smile=smile))


def make_chat(rng):
    """One chat as a list of messages."""
    t = Teller(rng)
    turns, style = [], None
    if rng.random() < 0.2:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            turns.append(rng.choice([fact, fact, small_sum, small_sum, spelled, comparison])(t))
    else:
        style = rng.choices(list(STYLES), [6, 2, 2, 1])[0]
        problem = rng.choice(FAMILIES)(t)
        opening = problem.question
        if rng.random() < 0.15:
            opening = t.say("[Please help me with this:|Can you solve this one?|Homework again {smile}|Question from {town}:]", smile=rng.choice(EMOJI)) + "\n" + opening
        turns.append((opening, answer_in(style, problem, t)))
        while len(turns) < 3 and rng.random() < 0.3:
            turns.append(follow_up(problem, style, t))
    messages = []
    if style in ("sentence", "bare") or rng.random() < 0.45:
        system = STYLES[style] if style and (style in ("sentence", "bare") or rng.random() < 0.6) else GENERAL_SYSTEM
        messages.append({"role": "system", "content": t.say(system)})
    for user, assistant in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return messages


def make_chats(seed, count):
    """`count` chats, no two alike."""
    rng, seen, chats = random.Random(seed), set(), []
    while len(chats) < count:
        chat = make_chat(rng)
        key = json.dumps(chat)
        if key not in seen:
            seen.add(key)
            chats.append(chat)
    return chats


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=QUICKSTART_SEED)
    parser.add_argument("--count", type=int, default=QUICKSTART_COUNT)
    parser.add_argument("--out", type=Path, default=QUICKSTART_PATH)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", encoding="utf-8", newline="\n") as f:
        for chat in make_chats(args.seed, args.count):
            f.write(json.dumps({"messages": chat}, ensure_ascii=False) + "\n")
    print(f"{args.out}: {args.count} chats, {args.out.stat().st_size} bytes, seed {args.seed}")


if __name__ == "__main__":
    main()

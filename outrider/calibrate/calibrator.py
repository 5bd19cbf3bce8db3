"""Decides in every round, for every sequence, which drafter is asked, how far it may draft, and how much of the draft is verified.

The goal is tokens per second. A choice is worth its expected tokens minus its expected seconds times the throughput that is being
achieved: the one with the most worth, of all sizes on offer and not only of the next larger, is the one that maximises tokens over time
(Dinkelbach 1967), on any curve of costs. The throughput is that of the choices made lately, and never less than plain decoding's.

Drafters whose draft costs next to nothing are asked first; what they return is cut to the nodes worth verifying. A drafter that pays for
each level is asked when what may be expected of it, by depth, is worth more than that; it learns from the price of a row and of a step
where to stop. A drafter that is not worth asking is left alone, and tried again after pauses that double and cost a hundredth at most.
"""

from __future__ import annotations

import time
from typing import Callable
from typing import Sequence as Many
from weakref import WeakKeyDictionary

from ..decode import Pace, Sequence
from ..drafters.auto import ask_part, parts_of
from ..drafters.base import Ask, Drafter, NoDrafter, Work
from ..targets.base import Target
from ..trace import Round
from ..tree import Budget, DraftTree
from .acceptance import HIGH, Pair
from .costs import Curve
from .offers import Ahead, Offer, better, by_level, cut_to, to_learn, worth_of
from .parts import PROBES, Part, Plan, Stance, Track

MOST = 64
"""Nodes that a drafter is ever asked for, where nobody says."""
LEVELS = 16
"""Levels that a drafter is asked for which pays for each."""
FIRST, FOR_KEPT = 3, 4
"""As long as it is not known how it does on a text: levels of a first draft, and how many more there may be for each level that was kept."""
USUALLY = 1000
"""Tokens of which it is known how many came of free drafts, about."""
GLIMPSE = 8
"""Rounds in which a text shows what kind it is, before a drafter has to read it; at most twice what reading takes, at least that."""
AHEAD = 128
"""Tokens that a drafter which has missed some of a text is expected to be of use for, where it is of use."""
PAUSE = 8
"""Longest pause, in rounds, of a drafter whose probes cost less than that."""
GLANCES = 4
"""In a longer pause one of so many rounds has a thought for whether it should end."""
RECENT = 0.6
"""Weight of the throughput so far, with each round. A good stretch has so many tokens, not so many rounds: in it a second is worth what the
stretch gives, not what the text gives on average, so the throughput follows quickly.
"""
LATELY = 0.9
"""The same of what asking a drafter was worth."""
ENOUGH = 8
"""Nodes that a drafter is asked for whose drafts cost next to nothing; more where many were wanted."""
UNLIKELY, LIKELY = 0.02, 0.25
"""A node less likely than the first is not asked for, however cheap rows are; one more likely than the second is, however dear."""
PLAIN = 32
"""After so many rounds without a plain one there is one, for all is measured by it; more where it would be missed more."""
FED = 0.5
"""Weight of a measurement of what it takes to catch up with tokens that were missed; of the first too."""
SETTLED, SELDOM = 24, 8
"""After so many drafts of a part that cost next to nothing, of so many one is timed."""
SOON, OFTEN = 8, 4
"""After `SOON` rounds, as long as costs of that size, of about so many sequences, were measured less often than that."""
ENOUGH_PROBES = 3
"""After so many of a part in which nothing was found, by any sequence, a new sequence does not begin with short pauses either."""
LITTLE = 1e-6
"""Worth of a drafter whose own last drafts were better than the next promises to be, for each token that a plain round's time gives more.
They make a second dear, but nothing better comes of plain decoding. In a batch all sequences have one price."""
LEAST = 1e-9
"""Worth of what is verified to learn from it."""
BAND = 1024
"""Tokens of context from which on each doubling has costs of its own. So has each doubling of the sequences in a batch."""
WARM_UP = (1, 8, 4, 2, 16, 6, 12, 3)
"""Rows of the passes that are timed at the start, in this order, as long as there is time."""


class Calibrator(Pace):
    """A Pace that decides by what it measures. One serves all sequences of a session.

    drafter: of the sequences that have none of their own. most: nodes in a round. clock: nanoseconds, for what drafts cost.
    """

    def __init__(self, drafter: Drafter, most: int = MOST, clock: Callable[[], int] = time.perf_counter_ns):
        self.drafter = drafter
        self.most = most
        self.deciding_ns = 0
        """Time spent here, drafters apart."""
        self._clock = clock
        self._parts: WeakKeyDictionary[Drafter, Part] = WeakKeyDictionary()
        self._tracks: WeakKeyDictionary[Sequence, Track] = WeakKeyDictionary()
        self._bands: dict[tuple[int, int], Curve] = {}
        self._pass = Curve()
        self._tokens = self._seconds = 0.0
        self._plain = self._rate = 1.0
        """Seconds of a plain round, and tokens a second that are being achieved."""
        self._price = UNLIKELY
        """How likely a node must be to be asked for: what a row costs on average, in tokens of plain decoding. Not of the throughput: in a good
        stretch a drafter's own scores are too low."""
        self._rounds = 0
        self._share = 1.0
        """Of all tokens lately, those that did not come of a free draft."""
        self._active: list[Track] = []
        self._learned: list[Round] = []

    # ---- before the drafts -----------------------------------------------------------------------------------------------

    def budgets(self, sequences: Many[Sequence]) -> list[Budget]:
        began = time.perf_counter_ns()
        self._digest()
        self._pass = self._band(max(len(s.tokens) for s in sequences), len(sequences))
        self._active = [self._track(s) for s in sequences]
        self._tokens *= RECENT
        self._seconds *= RECENT
        base = len(sequences)
        self._plain = plain = self._pass(base)
        self._rate = rate = max(self._tokens / self._seconds, base / plain) if self._seconds else base / plain
        self._price = min(max(base * (self._pass(base + ENOUGH) / plain - 1) / ENOUGH, UNLIKELY), LIKELY)
        self._pass.since_plain += 1
        is_due = self._pass.since_plain > PLAIN * (rate * plain / base) ** 4 or not self._pass.knows(base)
        is_due = is_due or (self._pass.since_plain > SOON and not self._pass.is_common(base, OFTEN))
        self._rounds += 1
        made = []
        for s, track in zip(sequences, self._active):
            track.plan = Plan() if is_due else self._planned(s, track, plain, rate)
            made.append(self._budget(track.plan, s.sampler.matcher is not None))
        if not any(budget.nodes for budget in made):
            self._expect(float(len(made)), plain)
        self.deciding_ns += time.perf_counter_ns() - began
        return made

    def _track(self, s: Sequence) -> Track:
        track = self._tracks.get(s)
        if track is None:
            drafters = parts_of(s.drafter or self.drafter)
            for drafter in drafters:
                if drafter not in self._parts:
                    self._parts[drafter] = Part(drafter, self._rounds)
            parts = [self._parts[d] for d in drafters if not isinstance(d, NoDrafter)]
            track = self._tracks[s] = Track(parts, self._share)
        return track

    def _band(self, length: int, sequences: int = 1) -> Curve:
        """The costs of passes over about this much context, for about so many sequences: a row of another sequence costs more than one
        of the same. At first like those of the nearest that was measured.
        """
        band = context, many = (length // BAND).bit_length(), sequences.bit_length()
        if band not in self._bands:
            near = min(self._bands, key=lambda other: (abs(other[1] - many), abs(other[0] - context)), default=None)
            if near is None:
                self._bands[band] = Curve()
            elif near[1] == many:
                self._bands[band] = self._bands[near].copy()
            else:
                self._bands[band] = self._bands[near].shape(1 << many - 1)
        return self._bands[band]

    def _expect(self, tokens: float, seconds: float) -> None:
        """A round has been decided that is expected to give so much."""
        self._tokens += tokens
        self._seconds += seconds

    def _planned(self, s: Sequence, track: Track, plain: float, rate: float) -> Plan:
        """Whom to ask, and how far the one that costs may go."""
        plan = Plan()
        track.rounds += 1
        most, base = min(self.most, s.room - 1), len(self._active)
        for i, (part, stance) in enumerate(zip(track.parts, track.stances)):
            limit = part.limit(most, len(s.tokens))
            part.acceptance.pass_by(stance.nodes, stance.depths)
            if limit <= 0:
                continue
            if part.is_free:
                if track.rounds >= stance.resume:
                    plan.free.append(i)
                continue
            feeding = part.feeding * max(len(s.tokens) - stance.seen - LEVELS, 0)
            reading = feeding / plain
            if track.rounds < max(stance.look, reading, min(2 * reading, GLIMPSE)):
                continue
            limit = min(limit, LEVELS, FIRST + FOR_KEPT * stance.kept)
            ahead = self._ahead(part, stance.depths.belief, stance.depths.harder, limit, plain, rate)
            left = min(s.room, AHEAD) * track.share  # it is to be of use for a while
            worth = ahead.worth - rate * feeding / ahead.rounds(left)
            if ahead.worth <= 0 and track.last == i and base == 1:
                worth = LITTLE * (ahead.rate * plain - 1)
            is_probe = False
            if worth > 0:
                stance.pause = part.fruitless = 0
            elif track.rounds >= stance.resume and not plan.is_probe:
                rows = max(self._pass(base + round(ahead.depth * part.rows)) - plain, 0.0)  # on a noisy machine
                cost = part.seconds(ahead.depth, plain) + rows + feeding
                high = self._ahead(part, HIGH, stance.depths.harder, limit, plain, rate)
                good = high.worth - plan.worth  # of another that is asked otherwise
                hope = stance.depths.high * good * high.rounds(left) / rate
                is_early = track.tokens <= s.room  # later it would be of use for the next sequence only
                knows = stance.seen and not feeding
                if knows or hope >= cost or (is_early and part.can_spend(cost / plain, self._rounds)):
                    good *= part.acceptance.changes / high.emitted
                    self._wait(stance, track.rounds, cost, good, plain, 1.0 if part.fruitless >= ENOUGH_PROBES else 0.25)
                    part.fruitless += 1
                    worth, is_probe = 1e9, True
                else:
                    stance.resume = track.rounds + PAUSE
            if worth <= 0 and stance.resume > track.rounds + PAUSE:
                stance.look = track.rounds + GLANCES
            if worth > plan.worth:
                plan.is_probe = is_probe
                plan.paid, plan.worth, plan.depth, plan.step, plan.rate = i, worth, ahead.depth, ahead.step, ahead.rate
        return plan

    def _ahead(self, part: Part, belief: Pair, harder: float, limit: int, plain: float, rate: float) -> Ahead:
        """The most that a draft can be expected to be worth, over all depths. A step is worth its price in drafts as likely as make the best
        number of further steps worth their cost.
        """
        kept, drafted = part.acceptance.ahead(limit, belief, harder)
        limit, base = len(kept) - 1, len(self._active)
        line, drift = self._pass.line(base + round(limit * part.rows)), self._pass.drift
        steps = part.steps(limit, plain)
        steps[0] = steps[1]  # it takes a step to have no guess
        spent = [step + drift * line[base + round(k * part.rows)] for k, step in enumerate(steps)]
        best, depth = -1e9, 1
        tokens, seconds = [0.0], [steps[0]]
        # Gained in drafts that go on: how often they do follows from the price of a step, so it must not decide it.
        gained, path = [0.0], 1.0
        for k in range(1, limit + 1):
            tokens.append(tokens[-1] + kept[k])
            seconds.append(seconds[-1] + drafted[k] * (spent[k] - spent[k - 1]))
            path *= min(kept[k] / kept[k - 1] * drafted[k - 1] / max(drafted[k], 1e-9), 1.0)
            gained.append(gained[-1] + path)
            if tokens[k] - rate * seconds[k] > best:
                best, depth = tokens[k] - rate * seconds[k], k
        if best <= 0 and base == 1:
            reached = [(1 + tokens[k]) / (plain + seconds[k]) for k in range(1, limit + 1)]
            rate = max(reached)
            depth = 1 + reached.index(rate)
        further = [
            rate * (spent[k] - spent[1]) * gained[1] / (gained[k] - gained[1])
            for k in range(2, depth + 1)
            if gained[k] > gained[1]
        ]
        return Ahead(best, depth, min(max(min(further, default=0.0), 0.0), 1.0), 1 + tokens[depth], rate)

    def _wait(self, stance: Stance, now: int, cost: float, good: float, plain: float, first: float = 0.25) -> None:
        """After a probe: double the pause, up to `PAUSE` rounds or as many as make the cost of all sequences' probes a `PROBES` part of
        the time. Where good moods are known to come, not longer than loses the least by looking and by missing them together.

        cost: of a probe, in seconds. good: what a token in a good mood is worth, times how often one begins. first: a sequence's first
        pause, as a share of that longest one.
        """
        missed = cost / plain * len(self._active)  # tokens that all sequences have not emitted in that time
        dear = missed / PROBES
        stance.pause = int(min(max(2 * stance.pause, first * dear, 1), max(PAUSE, dear)))
        if good > 0:
            stance.pause = min(stance.pause, max(int((2 * missed / good) ** 0.5), 1))
        stance.resume = now + stance.pause

    def _budget(self, plan: Plan, has_grammar: bool) -> Budget:
        """All that any of the planned parts may need; a grammar may force tokens where none is asked."""
        if plan.free or has_grammar:
            return Budget(self.most, self.most, self._price, plan.step)
        return Budget(self.most, plan.depth, self._price, plan.step) if plan.paid is not None else Budget(0, 0)

    # ---- the drafts --------------------------------------------------------------------------------------------------------

    def propose(self, drafter: Drafter, sequences: Many[Sequence], work: Work) -> list[DraftTree]:
        began = time.perf_counter_ns()
        tracks = self._active if len(sequences) == len(self._active) else [self._tracks[s] for s in sequences]
        rate = self._rate
        best: list[Offer | None] = [None] * len(work)
        free: dict[int, list[int]] = {}
        paid: dict[int, list[int]] = {}
        for n, track in enumerate(tracks):
            for i in track.plan.free:
                free.setdefault(i, []).append(n)
        for i, asked in free.items():
            for n, offer in zip(asked, self._offers(drafter, i, asked, tracks, work, rate)):
                best[n] = better(best[n], self._judge(tracks[n], offer, rate, worth_of(best[n])))
        for n, track in enumerate(tracks):
            if track.plan.paid is not None and track.plan.is_wanted(worth_of(best[n])):
                paid.setdefault(track.plan.paid, []).append(n)
        for i, asked in paid.items():
            for n, offer in zip(asked, self._offers(drafter, i, asked, tracks, work, rate)):
                if tracks[n].plan.is_probe and offer.order:
                    offer = to_learn(offer, len(offer.order), max(offer.worth, worth_of(best[n]) + 1))
                if offer.tree.q is not None or offer.worth > worth_of(best[n]):  # what was drawn is verified
                    best[n] = offer
                else:
                    track, plan = tracks[n], tracks[n].plan
                    part, mood = track.parts[i], track.stances[i].depths
                    allowed = min(plan.depth, work[n].budget.depth)
                    part.acceptance.learn_depths(0, 0, by_level(offer), allowed, mood)
        trees = self._cut(tracks, work, best, rate)
        self.deciding_ns += time.perf_counter_ns() - began
        return trees

    def _offers(self, drafter: Drafter, i: int, asked: Many[int], tracks: Many[Track], work: Work, rate: float) -> list[Offer]:
        """What part `i` offers to those that ask it. Its cost is learned."""
        part, is_paid = tracks[asked[0]].parts[i], i == tracks[asked[0]].plan.paid
        asking, asks, budgets = [], [], []
        for n in asked:
            plan, most = tracks[n].plan, work[n].budget
            depth = min(plan.depth, most.depth) if is_paid else most.depth
            nodes = depth * part.nodes if is_paid else max(int(2 * part.wanted), ENOUGH)
            asking.append(tracks[n])
            asks.append(work[n])
            budgets.append(Budget(min(nodes, most.nodes), depth, self._price, plan.step if is_paid else 0.0))
        began, real = self._clock(), time.perf_counter_ns()
        trees = ask_part(drafter, i, asks, budgets)
        spent = (self._clock() - began) / len(asked) / 1e9
        self.deciding_ns -= time.perf_counter_ns() - real
        steps = parts_of(drafter)[i].steps or max([tree.depth for tree in trees])
        self._learn_draft(part, asking, i, asks, steps, spent)
        if is_paid:
            self._expect(0.0, part.seconds(steps, self._plain) * len(asked))
        return [self._offer(track, i, tree, track.plan.rate if is_paid else rate) for track, tree in zip(asking, trees)]

    def _learn_draft(self, part: Part, tracks: Many[Track], i: int, asks: Many[Ask], steps: int, spent: float) -> None:
        """What a draft took; of tokens that had to be caught up with, what each took besides."""
        missed = 0
        for track, ask in zip(tracks, asks):
            stance = track.stances[i]
            missed += max(len(ask.tokens) - stance.seen - LEVELS, 0)
            stance.seen = len(ask.tokens)
        part.asked += 1
        if missed > LEVELS * len(asks):  # what a few tokens take is lost in the noise of the draft
            more = max(spent - part.seconds(steps, self._plain), 0.0) * len(asks) / missed
            part.feeding += FED * (more - part.feeding)  # the first time is slow as a rule
        elif not missed and (not part.is_free or part.asked < SETTLED or part.asked % SELDOM == 0):
            part.learn(steps, spent, self._plain)

    def _offer(self, track: Track, i: int, tree: DraftTree, rate: float) -> Offer:
        """A draft with what is worth verifying of it: of all sizes the one whose tokens exceed its rows' cost the most."""
        if len(tree) == 1:
            return Offer(0.0, i, tree, [1.0], [], 0)
        reach = track.parts[i].acceptance.reach(tree, track.stances[i].nodes)
        order = list(range(1, len(tree)))
        if not tree.is_chain:
            order.sort(key=lambda node: -reach[node])
        line, base = self._pass.line(len(self._active) + len(tree)), len(self._active)
        price = rate * self._pass.drift
        gained = best = 0.0
        taken = 0
        for size, node in enumerate(order[: self._known(base)], 1):
            gained += reach[node]
            worth = gained - price * (line[base + size] - line[base])
            if worth > best:
                best, taken = worth, size
        if tree.q is not None:
            taken = len(order)
            best = sum(reach) - 1 - price * (line[base + taken] - line[base])
        return Offer(best, i, tree, reach, order, taken)

    def _known(self, base: int) -> int:
        """Rows that a pass of `base` rows may have besides: not many more than were ever measured."""
        return max(2 * self._pass.most - base, 8)

    def _judge(self, track: Track, offer: Offer, rate: float, offered: float) -> Offer:
        """What asking a free part was worth, beside what was offered before; one that is worth nothing for a while is given a pause. Now and
        then a node of a draft that is worth nothing is verified all the same, or nothing would be learned.
        """
        part, stance = track.parts[offer.part], track.stances[offer.part]
        part.wanted += 0.2 * (offer.taken - part.wanted) if offer.taken < part.wanted else offer.taken - part.wanted
        plain = self._plain
        cost = part.seconds(len(offer.tree) - 1, plain)
        worth = max(offer.worth - offered, 0.0) - rate * cost
        stance.worth = worth if stance.worth is None else stance.worth + (1 - LATELY) * (worth - stance.worth)
        if offer.worth > offered:
            stance.worth = max(stance.worth, 0.1 * worth)
            stance.pause = stance.resume = 0
        elif stance.worth <= 0:
            self._wait(stance, track.rounds, cost, 0.0, plain)
        if offer.order and not offer.taken:
            stance.idle += 1
            base = len(self._active)  # all sequences together may spend so much
            if stance.idle * PROBES * plain > (self._pass(base + 1) - plain) * base:
                stance.idle = 0
                return to_learn(offer, 1, LEAST)
        return offer

    def _cut(self, tracks: Many[Track], work: Work, best: list[Offer | None], rate: float) -> list[DraftTree]:
        """What is verified: of all nodes of all sequences the likeliest, as many as are worth it together."""
        if len(best) > 1:
            best = self._shared(best, rate)
        made, tokens, rows = [], 0.0, 0
        for track, ask, offer in zip(tracks, work, best):
            plan = track.plan
            if offer is None:
                made.append(DraftTree.chain(ask.tokens[-1]))
                continue
            plan.chosen, plan.tree = offer.part, cut_to(offer)
            if offer.part == plan.paid:
                plan.chances, plan.allowed = by_level(offer), min(plan.depth, ask.budget.depth)
            made.append(plan.tree)
            tokens += sum(offer.reach[node] for node in offer.order[: offer.taken])
            rows += offer.taken
        base = len(self._active)
        self._expect(base + tokens, self._pass(base + rows))
        return made

    def _shared(self, best: list[Offer | None], rate: float) -> list[Offer | None]:
        """Rows shared out among sequences: their drafts compete for one pass."""
        offers = [(n, offer) for n, offer in enumerate(best) if offer is not None]
        fixed = {n: offer.taken if offer.tree.q is not None else offer.least for n, offer in offers}
        pool = [
            (-offer.reach[node], place, n)
            for n, offer in offers
            if offer.tree.q is None
            for place, node in enumerate(offer.order[offer.least :])
        ]
        pool.sort()
        base = len(self._active) + sum(fixed.values())
        line, price = self._pass.line(base + len(pool)), rate * self._pass.drift
        gained = most = 0.0
        size = 0
        for many, (minus, _, _) in enumerate(pool[: self._known(base)], 1):
            gained -= minus
            worth = gained - price * (line[base + many] - line[base])
            if worth > most:
                most, size = worth, many
        for _, _, n in pool[:size]:
            fixed[n] += 1
        return [offer and offer._replace(taken=fixed[n]) for n, offer in enumerate(best)]

    # ---- after a round -----------------------------------------------------------------------------------------------------

    def learn(self, rounds: Many[Round]) -> None:
        self._learned = list(rounds)

    def _digest(self) -> None:
        """Learn from the last rounds: here, so that all deciding is in one place of a round."""
        rounds, self._learned = self._learned, []
        if not rounds:
            return
        if any(r.number for r in rounds):  # first rounds are slow
            seconds = sum(r.times.total - r.times.propose for r in rounds) / 1e9
            self._pass.add(rounds[0].rows, seconds)
            if rounds[0].rows == len(rounds):
                self._pass.since_plain = 0
        for track, r in zip(self._active, rounds):
            left = track.note(len(r.emitted))
            self._share += (left - len(r.emitted) * self._share) / USUALLY
            if track.plan.chosen is not None and r.error is None:
                self._learn_verdicts(track, track.plan.chosen, r)

    def _learn_verdicts(self, track: Track, i: int, r: Round) -> None:
        part, stance, plan = track.parts[i], track.stances[i], track.plan
        part.acceptance.fade()
        assert plan.tree is not None
        size = len(plan.tree)
        if r.tokens[:size] != plan.tree.tokens:  # a grammar took something out of it
            return
        path = {node for node in r.path if node < size}  # what it added is not the drafter's
        depths = [0]
        nodes = []
        for node, parent in enumerate(r.parents[1:size], 1):
            depths.append(depths[parent] + 1)
            if parent in path:
                nodes.append((r.score[node] if r.score else None, depths[node], node in path))
        part.acceptance.learn_nodes(nodes, stance.nodes)
        if i == plan.paid:
            verified = max(depths)
            stance.kept = max(stance.kept, len(path) - 1)
            part.acceptance.learn_depths(len(path) - 1, verified, plan.chances, plan.allowed, stance.depths)
            if verified:
                part.rows += 0.1 * ((size - 1) / verified - part.rows)

    # ---- at the start --------------------------------------------------------------------------------------------------------

    def warm_up(self, target: Target, tokens: Many[int], seconds: float = 1.0) -> None:
        """Time a few passes of different sizes over different tokens of a text, for at most about so long. The cache is given back."""
        curve = self._band(len(tokens))
        slot = target.open()
        try:
            began = self._clock()
            half = len(tokens) // 2
            for _ in target.prefill(slot, tokens[:half]):
                pass
            for turn in range(3):
                for rows in WARM_UP:
                    if half + rows > len(tokens) or (turn and self._clock() - began > seconds * 1e9):
                        continue
                    started = self._clock()
                    target.forward([(slot, DraftTree.chain(tokens[half], tokens[half + 1 : half + rows]))])
                    target.commit(slot, ())
                    curve.add(rows, (self._clock() - started) / 1e9)
        finally:
            target.close(slot)

---------------------------- MODULE Grants ----------------------------
(* How one worker divides its capacity over its relays, by messages that cross.                                      *)
(*                                                                                                                   *)
(* The worker side is protocol/src/grants.rs, and the relay side relay/src/dispatch/rules: an action here is one step *)
(* of theirs, under the lock that they hold. Time is left out: a slot that was handed to a link may time out at any   *)
(* moment. Several workers are several instances: they share only the relays' queues, which change here at any       *)
(* moment. Multiplexers and relays without `core1` are not described.                                     *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
  Relays,       \* their names
  Links,        \* numbers: of links that joined at the same time, the worker prefers the lower one
  Ids,          \* the numbers of requests in flight on one link; a number is used again when nothing carries it
  Capacities,   \* the capacities that the worker may have
  MaxRequests,  \* the most requests of one relay that wait or are in flight
  MaxMessages,  \* the most messages in transit at once; states with more are checked, but not explored further
  HasQueues,    \* TRUE: relays have queues and report what changes. FALSE: anything may wait and be reported at any time
  MayFail,      \* TRUE: links are lost and replaced
  MayDrain,     \* TRUE: relays drain links, and the worker drains
  MayCancel,    \* TRUE: clients disconnect
  Bug           \* a seeded bug, or "none"

VARIABLES
  w,            \* the worker: its capacity and, for each link, what SlotAllocator knows
  r,            \* the relays: their queues and, for each link, what Dispatch knows
  up,           \* for each link, the messages from relay to worker that are not read yet
  down          \* for each link, those from worker to relay

vars == <<w, r, up, down>>

None == [slots |-> 0, others |-> 0, capacity |-> 0, links |-> 0]

Min(a, b) == IF a < b THEN a ELSE b
Minus(a, b) == IF a < b THEN 0 ELSE a - b

RECURSIVE Sum(_, _)
Sum(f, S) == IF S = {} THEN 0 ELSE LET x == TLCEval(CHOOSE y \in S : TRUE) IN f[x] + Sum(f, S \ {x})

----------------------------------------------------------------------------
(* The worker. *)

Joined(v) == {l \in Links : v.link[l] = "joined"}
Running(v, l) == Cardinality(v.running[l])
Held(v, l) == Running(v, l) + v.handed[l]
TotalRunning(v) == Sum([l \in Links |-> Running(v, l)], Joined(v))
Claimed(v) == Sum([l \in Links |-> Held(v, l)], Joined(v))
Unclaimed(v) == IF Bug = "handed_is_free" THEN Minus(v.capacity, TotalRunning(v)) ELSE Minus(v.capacity, Claimed(v))
WantsMore(v, l) == ~v.quiet[l] /\ v.handed[l] < v.waiting[l]

(* True if link a comes before b: fewer requests and slots, then served longer ago, then the lower number. *)
Before(v, a, b) ==
  \/ Held(v, a) < Held(v, b)
  \/ Held(v, a) = Held(v, b) /\ v.served[a] < v.served[b]
  \/ Held(v, a) = Held(v, b) /\ v.served[a] = v.served[b] /\ a <= b

RECURSIVE Revoke(_)
Revoke(v) ==
  LET holders == {l \in Joined(v) : v.handed[l] > 0} IN
  IF Claimed(v) <= v.capacity \/ holders = {} THEN v
  ELSE LET l == CHOOSE x \in holders : \A y \in holders : Before(v, y, x)
       IN Revoke([v EXCEPT !.handed[l] = @ - 1])

RECURSIVE Hand(_, _)
Hand(v, free) ==
  LET next == {l \in Joined(v) : WantsMore(v, l)} IN
  IF free = 0 \/ next = {} THEN v
  ELSE LET l == CHOOSE x \in next : \A y \in next : Before(v, x, y)
       IN Hand([v EXCEPT !.handed[l] = @ + 1], free - 1)

HandOut(v) ==
  LET trimmed == TLCEval([v EXCEPT !.handed = [l \in Links |-> Min(@[l], v.waiting[l])]])
      revoked == TLCEval(Revoke(trimmed))
  IN Hand(revoked, Unclaimed(revoked))

(* Ranks instead of a counter, so that there are finitely many: 0 is never served, and the order is kept. *)
Ranked(v) ==
  LET used == {v.served[l] : l \in Joined(v)} \ {0}
      rank(n) == IF n = 0 THEN 0 ELSE 1 + Cardinality({m \in used : m < n})
  IN [v EXCEPT !.served = [l \in Links |-> IF l \in Joined(v) THEN rank(@[l]) ELSE 0]]

Served(v, l) == [v EXCEPT !.served[l] = Cardinality(Links) + 1]

Values(v, l) ==
  [slots |-> Held(v, l) + Unclaimed(v), others |-> TotalRunning(v) - Running(v, l),
   capacity |-> v.capacity, links |-> Cardinality(Joined(v))]

Grant(g) == [kind |-> "grant", grant |-> g]

Grants(q) == {i \in 1..Len(q) : q[i].kind = "grant"}
Last(S) == CHOOSE i \in S : \A j \in S : j <= i

(* A seeded bug: the message is written before the grants that wait. *)
Overtaking(queue, message) ==
  SelectSeq(queue, LAMBDA m : m.kind # "grant") \o message \o SelectSeq(queue, LAMBDA m : m.kind = "grant")

IsCancel(tail) == tail # <<>> /\ Head(tail).kind = "cancel"
IsEnd(tail) == tail # <<>> /\ Head(tail).kind = "end"

(* Ends each action of the worker: `v0` is its new state, `tail` the message that follows the grant on the link      *)
(* `of`. A newer grant takes the place of an older one that is not written yet.                                      *)
Publish(v0, of, tail) ==
  LET v == TLCEval(Ranked(v0))
      values == TLCEval([l \in Links |-> IF l \in Joined(v) THEN Values(v, l) ELSE None])
      changed == TLCEval(IF Bug = "cancel_sends_no_grant" /\ IsCancel(tail) THEN {}
                         ELSE {l \in Joined(v) : values[l] # v.reported[l]})
      sent == IF Bug = "end_loses_grant" /\ IsEnd(tail) THEN {} ELSE changed
      message == IF IsCancel(tail) THEN <<>> ELSE tail
      behind(l, queue) == IF l # of THEN queue ELSE IF Bug = "reply_overtakes_grant" THEN Overtaking(queue, message) ELSE queue \o message
  IN /\ w' = [v EXCEPT !.reported = [l \in Links |-> IF l \in changed THEN values[l] ELSE @[l]]]
     /\ \E replaced \in SUBSET {l \in sent : Grants(down[l]) # {}} :
          down' = [l \in Links |->
            IF r.link[l] = "none" THEN <<>>
            ELSE IF l \notin sent THEN behind(l, down[l])
            ELSE IF l \in replaced THEN behind(l, [down[l] EXCEPT ![Last(Grants(down[l]))] = Grant(values[l])])
            ELSE behind(l, Append(down[l], Grant(values[l])))]

WorkerJoins(l) ==
  /\ w.link[l] = "new"
  /\ LET v == [w EXCEPT !.link[l] = "joined", !.served[l] = 0] IN Publish(HandOut(v), l, <<>>)
  /\ UNCHANGED <<r, up>>

(* The worker's end of a link is lost, with the requests on it. The relay still reads the messages in transit. *)
WorkerLeaves(l) ==
  /\ w.link[l] \in {"new", "joined"}
  /\ LET v == [w EXCEPT !.link[l] = "left", !.running[l] = {}, !.waiting[l] = 0, !.handed[l] = 0, !.quiet[l] = FALSE,
                        !.leaving[l] = FALSE, !.served[l] = 0, !.reported[l] = None]
     IN Publish(HandOut(v), l, <<>>)
  /\ up' = [up EXCEPT ![l] = <<>>]
  /\ UNCHANGED r

Read(l, kind) == w.link[l] = "joined" /\ up[l] # <<>> /\ Head(up[l]).kind = kind
Took(l) == up' = [up EXCEPT ![l] = Tail(@)]

WorkerReadsRequest(l, id) ==
  /\ Read(l, "request") /\ Head(up[l]).id = id
  /\ Took(l) /\ UNCHANGED r
  /\ LET heard == [w EXCEPT !.quiet[l] = FALSE, !.waiting[l] = Minus(@, 1)]
         fits == w.handed[l] > 0 \/ Unclaimed(w) > 0
         runs == Served([heard EXCEPT !.handed[l] = Minus(@, 1), !.running[l] = @ \cup {id}], l)
         waits == IF w.leaving[l] THEN heard ELSE [heard EXCEPT !.waiting[l] = @ + 1]
     IN IF fits THEN Publish(HandOut(runs), l, <<>>)
        ELSE Publish(HandOut(waits), l, <<[kind |-> "refused", id |-> id]>>)

(* A draining worker refuses every request, until it ends or its backend returns. *)
WorkerRefusesDraining(l, id) ==
  /\ Read(l, "request") /\ Head(up[l]).id = id
  /\ Took(l) /\ UNCHANGED r
  /\ Publish(w, l, <<[kind |-> "draining", id |-> id]>>)

WorkerReadsDemand(l, n) ==
  /\ Read(l, "demand") /\ Head(up[l]).waiting = n
  /\ Took(l) /\ UNCHANGED r
  /\ Publish(IF w.leaving[l] THEN w ELSE HandOut([w EXCEPT !.waiting[l] = n, !.quiet[l] = FALSE]), l, <<>>)

Freed(l, id) == HandOut(Served([w EXCEPT !.running[l] = @ \ {id}], l))

(* A cancel frees the slot at once. If the request has ended already, it changes nothing. *)
WorkerReadsCancel(l, id) ==
  /\ Read(l, "cancel") /\ Head(up[l]).id = id
  /\ Took(l) /\ UNCHANGED r
  /\ IF id \in w.running[l]
     THEN Publish(Freed(l, id), l, <<[kind |-> "cancel"]>>)
     ELSE UNCHANGED <<w, down>>

WorkerReadsLeaving(l) ==
  /\ Read(l, "leaving")
  /\ Took(l) /\ UNCHANGED r
  /\ LET v == [w EXCEPT !.leaving[l] = TRUE, !.waiting[l] = IF Bug = "leaving_keeps_demand" THEN @ ELSE 0]
     IN Publish(HandOut(v), l, <<>>)

(* Any other message, such as a ping: the link is active again. *)
WorkerHears(l) ==
  /\ w.link[l] = "joined" /\ w.quiet[l]
  /\ Publish(HandOut([w EXCEPT !.quiet[l] = FALSE]), l, <<>>)
  /\ UNCHANGED <<r, up>>

(* The response was read to its end, or the request failed: the slot is free before the relay reads the end. *)
WorkerEnds(l, id) ==
  /\ w.link[l] = "joined" /\ id \in w.running[l]
  /\ Publish(Freed(l, id), l, <<[kind |-> "end", id |-> id]>>)
  /\ UNCHANGED <<r, up>>

(* The same for a request whose link is about to end: its relay receives nothing. *)
WorkerDrops(l, id) ==
  /\ w.link[l] = "joined" /\ id \in w.running[l]
  /\ Publish(Freed(l, id), l, <<>>)
  /\ UNCHANGED <<r, up>>

TimesOut(unused) ==
  /\ \E l \in Joined(w) : unused[l] > 0
  /\ LET v == [w EXCEPT !.handed = [l \in Links |-> @[l] - unused[l]],
                        !.quiet = [l \in Links |-> @[l] \/ unused[l] > 0]]
     IN Publish(HandOut(v), CHOOSE l \in Links : TRUE, <<>>)
  /\ UNCHANGED <<r, up>>

WorkerSetsCapacity(n) ==
  /\ n # w.capacity
  /\ Publish(HandOut([w EXCEPT !.capacity = n]), CHOOSE l \in Links : TRUE, <<>>)
  /\ UNCHANGED <<r, up>>

----------------------------------------------------------------------------
(* The relays. *)

Own(l) == Cardinality(r.inflight[l])
WantsDemand(s, l) == s.link[l] = "up" /\ s.granted[l].links > 1

Waiting(l, kinds) == {up[l][i].id : i \in {j \in 1..Len(up[l]) : up[l][j].kind \in kinds}}
Replied(l) == {down[l][i].id : i \in {j \in 1..Len(down[l]) : down[l][j].kind \in {"end", "refused", "draining"}}}
Carries(l) == r.inflight[l] \cup w.running[l] \cup Waiting(l, {"request", "cancel"}) \cup Replied(l)

ToWorker(l, messages) == up' = IF w.link[l] = "left" THEN up ELSE [up EXCEPT ![l] = messages]
Sent(l, message) == ToWorker(l, Append(up[l], message))

(* The queue changed: each link that receives demand reports it, at the latest after 50 ms. *)
Marked(s, relay) ==
  IF HasQueues THEN [s EXCEPT !.owes = [l \in Links |-> @[l] \/ (s.relay[l] = relay /\ WantsDemand(s, l))]] ELSE s

(* Without `HasQueues`, anything may wait, so neither queues nor reports are recorded. *)
Queued(s, relay, n) == IF HasQueues THEN Marked([s EXCEPT !.queue[relay] = n], relay) ELSE s
Doubts(l) == HasQueues /\ r.counted[l] > 0

QueueChanges(relay, n) ==
  /\ n # r.queue[relay]
  /\ r' = Queued(r, relay, n)
  /\ UNCHANGED <<w, up, down>>

RelayJoins(l, relay) ==
  /\ r.link[l] = "none" /\ w.link[l] \in {"none", "left"} /\ up[l] = <<>> /\ down[l] = <<>>
  /\ r' = [r EXCEPT !.link[l] = "up", !.relay[l] = relay, !.granted[l] = None, !.fresh[l] = {}, !.counted[l] = 0,
                    !.owes[l] = FALSE, !.doubtful[l] = FALSE]
  /\ w' = [w EXCEPT !.link[l] = "new"]
  /\ UNCHANGED <<up, down>>

MaySend(l) ==
  /\ r.link[l] = "up" /\ (HasQueues => r.queue[r.relay[l]] > 0)
  /\ Own(l) < r.granted[l].slots + (IF Bug = "one_too_many" THEN 1 ELSE 0)

RelaySends(l, id) ==
  /\ MaySend(l) /\ id \notin Carries(l)
  /\ LET s == [r EXCEPT !.inflight[l] = @ \cup {id}, !.fresh[l] = @ \cup {id}, !.doubtful[l] = @ \/ Doubts(l),
                        !.counted[l] = Minus(@, 1)]
     IN r' = Queued(s, r.relay[l], Minus(r.queue[r.relay[l]], 1))
  /\ Sent(l, [kind |-> "request", id |-> id])
  /\ UNCHANGED <<w, down>>

(* A newer demand replaces an unwritten one, and goes to the end if a request was queued in between. *)
DemandQueues(q, n) ==
  LET demands == {i \in 1..Len(q) : q[i].kind = "demand"}
      i == Last(demands)
      message == [kind |-> "demand", waiting |-> n]
      without == SubSeq(q, 1, i - 1) \o SubSeq(q, i + 1, Len(q))
  IN {Append(q, message)} \cup
     (IF demands = {} THEN {}
      ELSE IF \E j \in i..Len(q) : q[j].kind = "request" THEN {Append(without, message)}
      ELSE {[q EXCEPT ![i] = message]})

RelayReportsDemand(l, n) ==
  /\ WantsDemand(r, l)
  /\ r' = [r EXCEPT !.owes[l] = FALSE, !.doubtful[l] = FALSE, !.counted[l] = IF HasQueues THEN n ELSE 0]
  /\ \E q \in DemandQueues(up[l], n) : ToWorker(l, q)
  /\ UNCHANGED <<w, down>>

HasNews(l) == WantsDemand(r, l) /\ (r.doubtful[l] \/ r.counted[l] # r.queue[r.relay[l]])

(* The report is due, but nothing changed since the last one. *)
RelayStaysSilent(l) ==
  /\ r.owes[l] /\ ~HasNews(l)
  /\ r' = [r EXCEPT !.owes[l] = FALSE]
  /\ UNCHANGED <<w, up, down>>

Without(l, id) == [r EXCEPT !.inflight[l] = @ \ {id}, !.fresh[l] = @ \ {id}]

(* A cancelled request that is not written yet leaves the queue instead, and the worker never knows of it. *)
RelayCancels(l, id) ==
  /\ r.link[l] # "none" /\ id \in r.inflight[l]
  /\ r' = Without(l, id)
  /\ \/ Sent(l, [kind |-> "cancel", id |-> id])
     \/ /\ \E i \in 1..Len(up[l]) : up[l][i] = [kind |-> "request", id |-> id]
        /\ up' = [up EXCEPT ![l] = SelectSeq(@, LAMBDA m : m # [kind |-> "request", id |-> id])]
  /\ UNCHANGED <<w, down>>

(* The end of a response waits for the pieces before it, and any message may overtake it. A reply to a request that    *)
(* was cancelled has no effect.                                                                                        *)
Readable(l, i) ==
  /\ r.link[l] # "none" /\ i \in 1..Len(down[l])
  /\ \A j \in 1..(i - 1) : down[l][j].kind = "end" \/ (down[l][j].kind # "grant" /\ down[l][j].id \notin r.inflight[l])
Takes(l, i, kind) ==
  /\ Readable(l, i) /\ down[l][i].kind = kind
  /\ down' = [down EXCEPT ![l] = SubSeq(@, 1, i - 1) \o SubSeq(@, i + 1, Len(@))]
  /\ UNCHANGED <<w, up>>

RelayReadsGrant(l, i) ==
  /\ Takes(l, i, "grant")
  /\ LET s == [r EXCEPT !.granted[l] = down[l][i].grant, !.fresh[l] = {}]
         begins == WantsDemand(s, l) /\ ~WantsDemand(r, l)
         doubts == Doubts(l)
     IN r' = [s EXCEPT !.owes[l] = HasQueues /\ WantsDemand(s, l) /\ (@ \/ begins \/ doubts), !.doubtful[l] = @ \/ doubts]

(* If a grant arrived since the request was sent, it stands. Otherwise the worker is full until the next one. *)
RelayReadsRefusal(l, i) ==
  /\ Takes(l, i, "refused")
  /\ LET id == down[l][i].id
         gone == Without(l, id)
         lowered == IF id \in r.fresh[l] \/ Bug = "refusal_outlives_grant"
                    THEN [gone EXCEPT !.granted[l].slots = Min(@, Cardinality(gone.inflight[l]))] ELSE gone
         back == Queued([lowered EXCEPT !.doubtful[l] = HasQueues], r.relay[l], r.queue[r.relay[l]] + 1)
     IN r' = IF id \in r.inflight[l] THEN back ELSE r

RelayReadsEnd(l, i) ==
  /\ Takes(l, i, "end")
  /\ r' = Without(l, down[l][i].id)

(* The relay stops sending over the link: another one replaces it, or it drains. *)
RelayStops(l) ==
  /\ r.link[l] = "up"
  /\ r' = [r EXCEPT !.link[l] = "stopped", !.owes[l] = FALSE]
  /\ UNCHANGED <<w, up, down>>

RelayAnnouncesLeaving(l) ==
  /\ r.link[l] # "none"
  /\ r' = [r EXCEPT !.link[l] = "leaving", !.owes[l] = FALSE]
  /\ Sent(l, [kind |-> "leaving"])
  /\ UNCHANGED <<w, down>>

(* The worker drains: the relay sends it nothing more. *)
RelayReadsDraining(l, i) ==
  /\ Takes(l, i, "draining")
  /\ LET id == down[l][i].id
         gone == [Without(l, id) EXCEPT !.link[l] = IF @ = "up" THEN "stopped" ELSE @, !.owes[l] = FALSE]
     IN r' = IF id \in r.inflight[l] THEN Queued(gone, r.relay[l], r.queue[r.relay[l]] + 1) ELSE r

(* The relay's end of a link is lost. Requests of which no client has received anything wait again: `back` of them. *)
RelayLoses(l, back) ==
  /\ r.link[l] # "none" /\ back <= Own(l)
  /\ LET s == [r EXCEPT !.link[l] = "none", !.inflight[l] = {}, !.fresh[l] = {}, !.granted[l] = None, !.owes[l] = FALSE,
                        !.doubtful[l] = FALSE, !.counted[l] = 0]
     IN r' = Queued(s, r.relay[l], r.queue[r.relay[l]] + back)
  /\ down' = [down EXCEPT ![l] = <<>>]
  /\ UNCHANGED <<w, up>>

----------------------------------------------------------------------------
(* All together. *)

Init ==
  /\ \E n \in Capacities :
       w = [capacity |-> n, link |-> [l \in Links |-> "none"], running |-> [l \in Links |-> {}],
            waiting |-> [l \in Links |-> 0], handed |-> [l \in Links |-> 0], quiet |-> [l \in Links |-> FALSE],
            leaving |-> [l \in Links |-> FALSE], served |-> [l \in Links |-> 0], reported |-> [l \in Links |-> None]]
  /\ r = [queue |-> [x \in Relays |-> 0], link |-> [l \in Links |-> "none"], relay |-> [l \in Links |-> CHOOSE x \in Relays : TRUE],
          inflight |-> [l \in Links |-> {}], fresh |-> [l \in Links |-> {}], granted |-> [l \in Links |-> None],
          counted |-> [l \in Links |-> 0], owes |-> [l \in Links |-> FALSE], doubtful |-> [l \in Links |-> FALSE]]
  /\ up = [l \in Links |-> <<>>]
  /\ down = [l \in Links |-> <<>>]

LinksOf(relay) == {l \in Links : r.link[l] # "none" /\ r.relay[l] = relay}
InFlightOf(relay) == Sum([l \in Links |-> Own(l)], LinksOf(relay))

(* A request takes the lowest number that nothing carries. *)
Free(l) == {id \in Ids \ Carries(l) : \A other \in Ids \ Carries(l) : id <= other}

Sends(l) == \E id \in Free(l) : RelaySends(l, id)
Reports(l) ==
  IF HasQueues
  THEN r.owes[l] /\ HasNews(l) /\ RelayReportsDemand(l, r.queue[r.relay[l]])
  ELSE \E n \in 0..MaxRequests : RelayReportsDemand(l, n)

Holders == {l \in Joined(w) : w.handed[l] > 0}
Unused == {[l \in Links |-> IF l \in Holders THEN Min(n[l], w.handed[l]) ELSE 0] : n \in [Holders -> 0..w.capacity]}

WorkerReads(l) ==
  \/ \E id \in Ids : WorkerReadsRequest(l, id) \/ WorkerReadsCancel(l, id) \/ (MayDrain /\ WorkerRefusesDraining(l, id))
  \/ \E n \in 0..MaxRequests : WorkerReadsDemand(l, n)
  \/ WorkerReadsLeaving(l)

RelayReads(l) ==
  \E i \in 1..Len(down[l]) :
    \/ RelayReadsGrant(l, i) \/ RelayReadsEnd(l, i)
    \/ RelayReadsRefusal(l, i) \/ RelayReadsDraining(l, i)

Joins(l, relay) == RelayJoins(l, relay) /\ \A m \in LinksOf(relay) : r.link[m] \in {"stopped", "leaving"}

Fails(l) ==
  \/ WorkerLeaves(l)
  \/ \E back \in (IF HasQueues THEN 0..Own(l) ELSE {0}) : RelayLoses(l, back)

Next ==
  \/ \E relay \in Relays :
       \/ /\ HasQueues /\ r.queue[relay] + InFlightOf(relay) < MaxRequests
          /\ QueueChanges(relay, r.queue[relay] + 1)
       \/ HasQueues /\ MayCancel /\ r.queue[relay] > 0 /\ QueueChanges(relay, r.queue[relay] - 1)
       \/ \E l \in Links : (MayFail \/ MayDrain \/ LinksOf(relay) = {}) /\ Joins(l, relay)
  \/ \E l \in Links :
       \/ WorkerJoins(l) \/ WorkerReads(l) \/ WorkerHears(l)
       \/ Sends(l) \/ Reports(l) \/ RelayStaysSilent(l) \/ RelayReads(l)
       \/ \E id \in Ids : WorkerEnds(l, id)
       \/ MayCancel /\ \E id \in Ids : RelayCancels(l, id)
       \/ MayDrain /\ (RelayStops(l) \/ (r.link[l] # "leaving" /\ RelayAnnouncesLeaving(l)))
       \/ MayFail /\ Fails(l)
  \/ \E unused \in Unused : TimesOut(unused)
  \/ \E n \in Capacities : WorkerSetsCapacity(n)

Bounded == Sum([l \in Links |-> Len(up[l]) + Len(down[l])], Links) <= MaxMessages

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* What is promised. *)

Live(l) == w.link[l] = "joined" /\ r.link[l] # "none"

(* Slots are handed out only within the capacity, and only to links that wait. *)
HandedWithinCapacity == (\E l \in Links : w.handed[l] > 0) => Claimed(w) <= w.capacity
HandedOnlyToWaiting == \A l \in Links : w.handed[l] <= w.waiting[l]

(* A link that leaves is handed nothing: it sends no request that could use it. *)
NothingForLeaving == \A l \in Links : w.leaving[l] => w.handed[l] = 0

(* No slot is free while a relay waits for one. So the grants follow the demand in the step that reads it. *)
NoSlotIdles == Minus(w.capacity, Claimed(w)) > 0 => \A l \in Joined(w) : ~WantsMore(w, l)

(* Each relay has read the newest grant, or it is on the way; only a refusal may have lowered it since. *)
GrantsArrive ==
  \A l \in Links : Live(l) /\ w.reported[l] # None =>
    IF Grants(down[l]) # {} THEN down[l][Last(Grants(down[l]))].grant = w.reported[l]
    ELSE /\ [r.granted[l] EXCEPT !.slots = 0] = [w.reported[l] EXCEPT !.slots = 0]
         /\ r.granted[l].slots <= w.reported[l].slots

GrantsStateTheTruth == \A l \in Joined(w) : w.reported[l] = Values(w, l)

(* Once everything is read, a relay may use all that the worker has for it. *)
NoGrantIsLost ==
  \A l \in Links : Live(l) /\ up[l] = <<>> /\ down[l] = <<>> =>
    r.granted[l].slots = w.reported[l].slots

(* Each request of a relay is in one place: on its way, running, or replied to. The worker runs no other, except those *)
(* whose cancel is on its way.                                                                                         *)
NoRequestIsLost ==
  \A l \in Links : Live(l) =>
    /\ r.inflight[l] \subseteq Waiting(l, {"request"}) \cup w.running[l] \cup Replied(l)
    /\ w.running[l] \subseteq r.inflight[l] \cup Waiting(l, {"cancel"})
    /\ Waiting(l, {"request"}) \cap w.running[l] = {}

(* No request begins beyond the capacity, whatever became of it since. *)
NeverOverfilled == [][\A l \in Links : w'.running[l] \ w.running[l] # {} => TotalRunning(w)' <= w'.capacity]_vars

(* A relay sends no more than its last grant allows. *)
RelaysObey == [][\A l \in Links : r'.inflight[l] \ r.inflight[l] # {} => Cardinality(r'.inflight[l]) <= r'.granted[l].slots]_vars

(* The worker refuses a request only if all slots that its relay has are in use, and every grant goes first: so the    *)
(* newest, which states that, is read before the refusal.                                                             *)
RefusalsAreStated ==
  [][\A l \in Links : \A i \in 1..Len(down'[l]) :
       down'[l][i].kind = "refused" /\ down'[l][i].id \notin Replied(l)
         => /\ w'.reported[l].slots = Cardinality(w'.running[l])
            /\ \A j \in Grants(down'[l]) : j < i]_vars

(* A request that waits is never forgotten: there is a message in transit, a request that runs, a slot that waits for  *)
(* its request, something that its relay must send, or a link that one side has lost and the other will lose. Pings    *)
(* are not needed.                                                                                                     *)
NothingIsStuck ==
  \/ \A relay \in Relays : r.queue[relay] = 0 \/ ~\E l \in LinksOf(relay) : r.link[l] = "up"
  \/ \E l \in Links :
       up[l] # <<>> \/ down[l] # <<>> \/ w.link[l] = "new" \/ w.running[l] # {} \/ w.handed[l] > 0 \/ r.owes[l] \/ MaySend(l)
         \/ (w.link[l] = "left" /\ r.link[l] # "none") \/ (w.link[l] = "joined" /\ r.link[l] = "none")
=============================================================================

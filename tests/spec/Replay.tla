---------------------------- MODULE Replay ----------------------------
(* Replays traces of the simulation (traces.py): each step must be one that Grants allows, with the grants that it queued. *)
(* Where a trace does not show whether a message was already written, all possibilities are followed. A trace is replayed  *)
(* if one of them reaches its end.                                                                                         *)
EXTENDS Grants, Traces

AllLinks == 1..MaxLink
AllCapacities == {Traces[t].capacity : t \in 1..Len(Traces)}

VARIABLES trace, at

Steps == Traces[trace].steps

Start ==
  /\ trace \in 1..Len(Traces) /\ at = 1
  /\ Init /\ w.capacity = Traces[trace].capacity

NewGrants == {<<l, w'.reported[l]>> : l \in {m \in Links : w'.reported[m] # w.reported[m] /\ w'.link[m] = "joined"}}
Silent(step) == step.grants = {} /\ UNCHANGED vars

ByWorker(step) ==
  LET l == step.l IN
  /\ CASE step.op = "joins" -> WorkerJoins(l)
       [] step.op = "leaves" -> WorkerLeaves(l)
       [] step.op = "request" -> WorkerReadsRequest(l, step.id)
       [] step.op = "drains" -> WorkerRefusesDraining(l, step.id)
       [] step.op = "demand" -> WorkerReadsDemand(l, step.n)
       [] step.op = "cancel" -> WorkerReadsCancel(l, step.id)
       [] step.op = "leaving" -> WorkerReadsLeaving(l)
       [] step.op = "ends" -> WorkerEnds(l, step.id)
       [] step.op = "frees" -> WorkerDrops(l, step.id)
       [] step.op = "hears" -> WorkerHears(l) \/ (~w.quiet[l] /\ Silent(step))
       [] step.op = "capacity" -> WorkerSetsCapacity(step.n) \/ (step.n = w.capacity /\ Silent(step))
       [] step.op = "timeout" -> (\E unused \in Unused : TimesOut(unused)) \/ Silent(step)
  /\ NewGrants = step.grants

Messages(l) == 1..Len(down[l])

ByRelay(step) ==
  LET l == step.l IN
  CASE step.op = "opens" -> RelayJoins(l, step.relay)
    [] step.op = "loses" -> RelayLoses(l, 0)
    [] step.op = "sends" -> RelaySends(l, step.id)
    [] step.op = "reports" -> RelayReportsDemand(l, step.n)
    [] step.op \in {"cancels", "unsends"} -> RelayCancels(l, step.id)
    [] step.op = "stops" -> RelayStops(l) \/ (r.link[l] # "up" /\ UNCHANGED vars)
    [] step.op = "announces_leaving" -> RelayAnnouncesLeaving(l)
    [] step.op = "reads_grant" -> \E i \in Messages(l) : RelayReadsGrant(l, i) /\ down[l][i].grant = step.grant
    [] step.op = "reads_end" -> \E i \in Messages(l) : RelayReadsEnd(l, i) /\ down[l][i].id = step.id
    [] step.op = "reads_refusal" -> \E i \in Messages(l) : RelayReadsRefusal(l, i) /\ down[l][i].id = step.id
    [] step.op = "reads_draining" -> \E i \in Messages(l) : RelayReadsDraining(l, i) /\ down[l][i].id = step.id

(* The furthest step of each trace is kept in a register of TLC's, which has one worker here. *)
Reached == IF TLCGet(trace) < at' THEN TLCSet(trace, at') /\ PrintT(<<"reached", trace, at>>) ELSE TRUE

Continue ==
  /\ at <= Len(Steps)
  /\ at' = at + 1 /\ UNCHANGED trace
  /\ IF Steps[at].op \in OfRelays THEN ByRelay(Steps[at]) ELSE ByWorker(Steps[at])
  /\ Reached

ASSUME \A t \in 1..Len(Traces) : TLCSet(t, 0)

Replays == Start /\ [][Continue]_<<vars, trace, at>>
=======================================================================

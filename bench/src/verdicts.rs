//! The goals, each a ratio within one run. The required goals beat every router for language models; the stretch goals come
//! near to no proxy at all.

use serde::{Deserialize, Serialize};

use crate::figures::{Figure, Medians};
use crate::systems::System;

/// The result of a goal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GoalResult {
    /// Its name.
    pub goal: String,
    /// Its description for a user.
    pub about: String,
    /// The required conditions.
    pub must: Vec<Condition>,
    /// The stretch conditions.
    pub stretch: Vec<Condition>,
}

/// One comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Condition {
    /// The compared figures, and the bound.
    pub text: String,
    /// The bounded number, if all its figures were measured.
    pub measured: Option<f64>,
    /// True if it holds.
    pub holds: Option<bool>,
}

impl GoalResult {
    fn new(goal: &str, about: &str, must: Vec<Condition>, stretch: Vec<Condition>) -> Self {
        Self { goal: goal.into(), about: about.into(), must, stretch }
    }
}

/// True if all hold; `None` if one was not measured and none is broken.
pub fn all_hold(conditions: &[Condition]) -> Option<bool> {
    let broken = conditions.iter().any(|condition| condition.holds == Some(false));
    let known = conditions.iter().all(|condition| condition.holds.is_some());
    if broken { Some(false) } else { known.then_some(true) }
}

/// A number that must not be larger than a bound.
fn at_most(text: &str, measured: Option<f64>, bound: f64) -> Condition {
    Condition { text: text.into(), measured, holds: measured.map(|value| value <= bound) }
}

fn at_least(text: &str, measured: Option<f64>, bound: f64) -> Condition {
    Condition { text: text.into(), measured, holds: measured.map(|value| value >= bound) }
}

struct Goals<'a>(&'a Medians);

impl Goals<'_> {
    fn of_modelrelay(&self, figure: Figure) -> Option<f64> {
        self.0.of_modelrelay(figure)
    }

    /// ModelRelay's figure as a multiple of another system's.
    fn ratio(&self, figure: Figure, to: System) -> Option<f64> {
        Some(self.of_modelrelay(figure)? / self.0.value(to, figure)?)
    }

    /// ModelRelay's figure minus another system's.
    fn added(&self, figure: Figure, to: System) -> Option<f64> {
        Some(self.of_modelrelay(figure)? - self.0.value(to, figure)?)
    }

    /// One of ModelRelay's figures as a multiple of another.
    fn within(&self, figure: Figure, to: Figure) -> Option<f64> {
        Some(self.of_modelrelay(figure)? / self.of_modelrelay(to)?)
    }

    /// The least factor from one number of workers to the next.
    fn least_step(&self) -> Option<f64> {
        use Figure::{Workers1, Workers2, Workers4, Workers8};
        let steps = [(Workers1, Workers2), (Workers2, Workers4), (Workers4, Workers8)];
        steps.into_iter().try_fold(f64::INFINITY, |least, (few, more)| Some(least.min(self.within(more, few)?)))
    }
}

/// All twelve goals.
pub fn verdicts(medians: &Medians) -> Vec<GoalResult> {
    let goals = Goals(medians);
    let mut all = waits(&goals);
    all.extend(costs(&goals));
    all.extend(scale(&goals));
    all
}

fn waits(goals: &Goals) -> Vec<GoalResult> {
    use Figure::{AloneP50, CpuPerRequest, FirstEventP50, FirstEventP99, Requests, Stalls};
    use System::{Direct, Nginx, Rathole, SglangRouter, VllmRouter};
    vec![
        GoalResult::new(
            "P1",
            "one request at a time",
            vec![
                at_most("median, × direct, at most 3.5", goals.ratio(AloneP50, Direct), 3.5),
                at_most("median, × sglang-router, at most 1.25", goals.ratio(AloneP50, SglangRouter), 1.25),
            ],
            vec![at_most("median, × vllm-router, at most 1", goals.ratio(AloneP50, VllmRouter), 1.0)],
        ),
        GoalResult::new(
            "P2",
            "responses per second to 32 clients",
            vec![at_least("× vllm-router, at least 1", goals.ratio(Requests, VllmRouter), 1.0)],
            vec![at_least("× rathole, at least 0.5", goals.ratio(Requests, Rathole), 0.5)],
        ),
        GoalResult::new(
            "P3",
            "processor time of a request",
            vec![at_most("× vllm-router, at most 1", goals.ratio(CpuPerRequest, VllmRouter), 1.0)],
            vec![at_most("× rathole, at most 2", goals.ratio(CpuPerRequest, Rathole), 2.0)],
        ),
        GoalResult::new(
            "P4",
            "time to the first token",
            vec![
                at_most("added to direct, median, at most 1 ms", goals.added(FirstEventP50, Direct), 1.0),
                at_most("added to direct, 99 of 100, at most 5 ms", goals.added(FirstEventP99, Direct), 5.0),
                at_most("first tokens after 35 to 50 ms, none", goals.of_modelrelay(Stalls), 0.0),
            ],
            vec![at_most("added to nginx, median, at most 0.3 ms", goals.added(FirstEventP50, Nginx), 0.3)],
        ),
    ]
}

fn costs(goals: &Goals) -> Vec<GoalResult> {
    use Figure::{
        Chunks, CpuPerLongPrompt, CpuPerPacedChunk, IdleWorkerCpu, IdleWorkerKib, RelayCpuPerPacedChunk, StreamKib,
    };
    use System::{Nginx, Rathole, VllmRouter};
    let relay_alone = || Some(goals.of_modelrelay(RelayCpuPerPacedChunk)? / goals.0.value(Nginx, CpuPerPacedChunk)?);
    vec![
        GoalResult::new(
            "P5",
            "processor time of a delivered token",
            vec![at_most("× vllm-router, at most 1", goals.ratio(CpuPerPacedChunk, VllmRouter), 1.0)],
            vec![
                at_most("× rathole, at most 1", goals.ratio(CpuPerPacedChunk, Rathole), 1.0),
                at_most("the relay alone, × nginx, at most 1", relay_alone(), 1.0),
            ],
        ),
        GoalResult::new(
            "P6",
            "maximum tokens per second",
            vec![
                at_least("× vllm-router, at least 1.2", goals.ratio(Chunks, VllmRouter), 1.2),
                at_least("× nginx, at least 0.55", goals.ratio(Chunks, Nginx), 0.55),
            ],
            vec![at_least("× rathole, at least 1", goals.ratio(Chunks, Rathole), 1.0)],
        ),
        GoalResult::new(
            "P7",
            "memory of an open stream, among a thousand",
            vec![at_most("× rathole, at most 1", goals.ratio(StreamKib, Rathole), 1.0)],
            vec![at_most("× nginx, at most 1.2", goals.ratio(StreamKib, Nginx), 1.2)],
        ),
        GoalResult::new(
            "P8",
            "an idle worker",
            vec![
                at_most("memory, at most 20 KiB", goals.of_modelrelay(IdleWorkerKib), 20.0),
                at_most("processor, at most 0.005 % of a core", goals.of_modelrelay(IdleWorkerCpu), 0.005),
            ],
            vec![at_most("memory, at most 12 KiB", goals.of_modelrelay(IdleWorkerKib), 12.0)],
        ),
        GoalResult::new(
            "P9",
            "processor time of a prompt of 220 kB",
            vec![at_most("× vllm-router, at most 1", goals.ratio(CpuPerLongPrompt, VllmRouter), 1.0)],
            vec![at_most("× rathole, at most 1", goals.ratio(CpuPerLongPrompt, Rathole), 1.0)],
        ),
    ]
}

fn scale(goals: &Goals) -> Vec<GoalResult> {
    use Figure::{
        ColdStart, DispatchFew, DispatchMany, IdleRelayMb, QueueLong, QueueLongModels, QueueShort, QueueShortModels,
        SlowClientGaps, SlowClientKib,
    };
    let (workers, queue) = (goals.within(DispatchMany, DispatchFew), goals.within(QueueLong, QueueShort));
    let models = goals.within(QueueLongModels, QueueShortModels);
    vec![
        GoalResult::new(
            "P10",
            "size",
            vec![
                at_most("dispatch among 10,000 workers, × among 10, at most 4", workers, 4.0),
                at_most("dispatch with 100,000 waiting, 99 of 100, × with 10, at most 2", queue, 2.0),
                at_most("the same with requests for 50 models, at most 2", models, 2.0),
                at_least(
                    "responses per second from 1 to 8 workers, smallest step, more than 1",
                    goals.least_step(),
                    1.0,
                ),
            ],
            vec![
                at_most("dispatch among 10,000 workers, × among 10, at most 1.25", workers, 1.25),
                at_most("dispatch with 100,000 waiting, × with 10, at most 1.25", queue, 1.25),
                at_most("the same with requests for 50 models, at most 1.25", models, 1.25),
            ],
        ),
        GoalResult::new(
            "P11",
            "one client of a hundred stops reading",
            vec![
                at_most("more memory, at most 512 KiB", goals.of_modelrelay(SlowClientKib), 512.0),
                at_most(
                    "gaps of the others, 99 of 100, at most 1.5 × those without",
                    goals.of_modelrelay(SlowClientGaps),
                    1.5,
                ),
            ],
            vec![at_most("more memory, at most 256 KiB", goals.of_modelrelay(SlowClientKib), 256.0)],
        ),
        GoalResult::new(
            "P12",
            "start",
            vec![
                at_most("until the relay listens, at most 200 ms", goals.of_modelrelay(ColdStart), 200.0),
                at_most("its memory then, at most 15 MB", goals.of_modelrelay(IdleRelayMb), 15.0),
            ],
            vec![
                at_most("until the relay listens, at most 50 ms", goals.of_modelrelay(ColdStart), 50.0),
                at_most("its memory then, at most 8 MB", goals.of_modelrelay(IdleRelayMb), 8.0),
            ],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Figures, Turn};

    fn medians(figures: &[(System, Figure, f64)]) -> Medians {
        let turn = |(system, figure, value): &(System, Figure, f64)| Turn {
            system: *system,
            round: 1,
            figures: Figures::from([(*figure, *value)]),
            right: 1,
            bytes: 1,
            faults: Vec::new(),
        };
        Medians::of(&figures.iter().map(turn).collect::<Vec<_>>())
    }

    fn goal(name: &str, figures: &[(System, Figure, f64)]) -> GoalResult {
        verdicts(&medians(figures)).into_iter().find(|verdict| verdict.goal == name).unwrap()
    }

    #[test]
    fn goals_compare_with_their_peers() {
        let alone = |ours| {
            let at = |system, value| (system, Figure::AloneP50, value);
            let direct = at(System::Direct, 1.0);
            goal(
                "P1",
                &[direct, at(System::SglangRouter, 2.4), at(System::VllmRouter, 2.0), at(System::Modelrelay, ours)],
            )
        };
        let (good, fair, slow) = (alone(2.0), alone(3.0), alone(3.1));
        assert_eq!((all_hold(&good.must), all_hold(&good.stretch)), (Some(true), Some(true)));
        assert_eq!((all_hold(&fair.must), all_hold(&fair.stretch)), (Some(true), Some(false)));
        assert_eq!(all_hold(&slow.must), Some(false));
    }

    #[test]
    fn goal_with_unmeasured_figures_is_unknown() {
        let verdict =
            goal("P1", &[(System::Direct, Figure::AloneP50, 1.0), (System::Modelrelay, Figure::AloneP50, 2.0)]);
        assert_eq!(all_hold(&verdict.must), None);
        assert_eq!(verdict.must[0].holds, Some(true));
        let broken =
            goal("P1", &[(System::Direct, Figure::AloneP50, 1.0), (System::Modelrelay, Figure::AloneP50, 9.0)]);
        assert_eq!(all_hold(&broken.must), Some(false), "one that is broken is enough");
    }

    #[test]
    fn single_stall_breaks_fourth_goal() {
        let first = |system, figure, value| (system, figure, value);
        let figures = [
            first(System::Direct, Figure::FirstEventP50, 1.0),
            first(System::Direct, Figure::FirstEventP99, 2.0),
            first(System::Modelrelay, Figure::FirstEventP50, 1.5),
            first(System::Modelrelay, Figure::FirstEventP99, 3.0),
        ];
        let with = |stalls| [&figures[..], &[first(System::Modelrelay, Figure::Stalls, stalls)]].concat();
        assert_eq!(all_hold(&goal("P4", &with(0.0)).must), Some(true));
        assert_eq!(all_hold(&goal("P4", &with(1.0)).must), Some(false));
    }

    #[test]
    fn every_goal_has_its_place() {
        let names: Vec<_> = verdicts(&Medians::default()).into_iter().map(|verdict| verdict.goal).collect();
        assert_eq!(names, (1..=12).map(|number| format!("P{number}")).collect::<Vec<_>>());
    }
}

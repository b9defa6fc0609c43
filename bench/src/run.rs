//! One run: rounds, in each of which every system has its turn, so that what the machine does meanwhile meets them all.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::figures::{Absent, Medians, Turn};
use crate::machine::Machine;
use crate::scenarios::{Extent, Part, Turns};
use crate::systems::{Installed, Setup, System, SystemError};
use crate::verdicts::{Verdict, verdicts};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounds.
    pub rounds: u32,
    /// Systems, each once a round.
    pub systems: Vec<System>,
    /// Parts of a turn.
    pub parts: Vec<Part>,
    /// How much of each.
    pub extent: Extent,
    /// Whether that is little.
    pub quick: bool,
    /// Where the programs are.
    pub installed: Installed,
}

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Where and when.
    pub machine: Machine,
    /// Rounds.
    pub rounds: u32,
    /// Whether too little was measured to mean much.
    pub quick: bool,
    /// How much of each.
    pub extent: Extent,
    /// Who had a turn, and the versions.
    pub systems: Vec<(System, String)>,
    /// Who had none.
    pub absent: Vec<Absent>,
    /// Every turn of every round.
    pub turns: Vec<Turn>,
    /// What became of the goals.
    pub verdicts: Vec<Verdict>,
}

impl Report {
    /// Answers that were right in every byte.
    pub fn right(&self) -> u64 {
        self.turns.iter().map(|turn| turn.right).sum()
    }

    /// Bytes that were compared.
    pub fn bytes(&self) -> u64 {
        self.turns.iter().map(|turn| turn.bytes).sum()
    }

    /// What went wrong with our own programs.
    pub fn own_faults(&self) -> Vec<String> {
        let absent = self.absent.iter().filter(|absent| absent.system == System::Modelrelay);
        let turns = self.turns.iter().filter(|turn| turn.system == System::Modelrelay);
        absent.map(|absent| absent.reason.clone()).chain(turns.flat_map(|turn| turn.faults.clone())).collect()
    }
}

/// Runs all of it. `tell` is told what is going on.
pub async fn run(options: &Options, folder: &Path, tell: impl Fn(&str)) -> Result<Report, SystemError> {
    let machine = Machine::here();
    let setup = Setup::new(&options.installed, folder).await?;
    let (mut turns, mut absent): (Vec<Turn>, Vec<Absent>) = (Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        for system in &options.systems {
            if absent.iter().any(|absent| absent.system == *system) {
                continue;
            }
            tell(&format!("round {round} of {}: {}", options.rounds, system.name()));
            match setup.start(*system).await {
                Ok(running) => {
                    let turn = Turns::new(&setup, &options.extent, *system, round).run(&options.parts, &running).await;
                    turn.faults.iter().for_each(|fault| tell(&format!("  {fault}")));
                    turns.push(turn);
                    running.stop().await;
                }
                Err(error) => {
                    tell(&format!("  {error}"));
                    absent.push(Absent { system: *system, reason: error.to_string() });
                }
            }
        }
    }
    let had_turn = |system: &&System| turns.iter().any(|turn| turn.system == **system);
    let systems = options.systems.iter().filter(had_turn).map(|system| (*system, setup.version(*system))).collect();
    let verdicts = verdicts(&Medians::of(&turns));
    let (rounds, quick, extent) = (options.rounds, options.quick, options.extent);
    Ok(Report { machine, rounds, quick, extent, systems, absent, turns, verdicts })
}

//! One run: rounds in which every system has its turn, so that disturbances of the machine affect all of them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::figures::{Absent, Turn};
use crate::machine::Machine;
use crate::scenarios::{Extent, Part, Turns};
use crate::systems::{Installed, Logs, Setup, System, SystemError};

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounds.
    pub rounds: u32,
    /// Systems, each once a round.
    pub systems: Vec<System>,
    /// Parts of a turn.
    pub parts: Vec<Part>,
    /// The extent of each part.
    pub extent: Extent,
    /// True if the extent is small.
    pub quick: bool,
    /// The paths of the programs.
    pub installed: Installed,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The place and time.
    pub machine: Machine,
    /// Rounds.
    pub rounds: u32,
    /// True if too little was measured to mean much.
    pub quick: bool,
    /// The extent of each part.
    pub extent: Extent,
    /// The systems that were measured, and their versions.
    pub systems: Vec<(System, String)>,
    /// The systems that were not.
    pub absent: Vec<Absent>,
    /// Every turn of every round.
    pub turns: Vec<Turn>,
    /// The name of each system in the tables.
    pub names: BTreeMap<System, String>,
}

impl Report {
    /// The faults of ModelRelay's own programs.
    pub fn own_faults(&self) -> Vec<String> {
        let absent = self.absent.iter().filter(|absent| absent.system == System::Modelrelay);
        let turns = self.turns.iter().filter(|turn| turn.system == System::Modelrelay);
        absent.map(|absent| absent.reason.clone()).chain(turns.flat_map(|turn| turn.faults.clone())).collect()
    }
}

/// Runs all of it, and reports its progress to `tell`.
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
            match setup.start(*system, Logs::Off).await {
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
    let names = System::ALL.into_iter().map(|system| (system, system.name().to_owned())).collect();
    let (rounds, quick, extent) = (options.rounds, options.quick, options.extent);
    Ok(Report { machine, rounds, quick, extent, systems, absent, turns, names })
}

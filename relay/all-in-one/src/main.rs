//! `modelrelay`: relay and worker in one program, and `up`, which runs both on this machine.
//!
//! It composes the libraries of the two programs. `modelrelay relay …` takes the command line of `modelrelay-relay`,
//! and so does the program under that name; likewise for the worker.

mod cli;
mod select;
mod up;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use cli::Command;
use modelrelay_platform::{own_program, parent};
use modelrelay_relay::settings::cli::CliError;
use select::{Program, selected};

/// Returns memory after a burst, which glibc's allocator does not.
#[cfg(all(unix, feature = "jemalloc"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let selection = selected(std::env::args_os().collect());
    if selection.is_part {
        parent::follow();
    }
    match selection.program {
        Some(program) => {
            own_program::set_selector(program.word());
            match program {
                Program::Relay => modelrelay_relay::app::program::run(selection.words),
                Program::Worker => modelrelay_worker::app::program::run(selection.words),
            }
        }
        None => own_command(selection.words),
    }
}

fn own_command(words: Vec<OsString>) -> ExitCode {
    match cli::parse(words) {
        Ok(Command::Up(args)) => up::run(&args),
        Ok(Command::Completions(args)) => print(modelrelay_manual::completions(&cli::command(), &args).as_bytes()),
        Ok(Command::Man(args)) => match modelrelay_manual::man(cli::command(), &args) {
            Ok(page) => print(&page),
            Err(why) => fail(&why),
        },
        Err(CliError::Information(text)) => print(text.as_bytes()),
        Err(CliError::Invalid(why)) => fail(&why),
    }
}

/// The reader may close the pipe before the end of the text.
fn print(text: &[u8]) -> ExitCode {
    let _ = io::stdout().write_all(text);
    ExitCode::SUCCESS
}

fn fail(why: &str) -> ExitCode {
    modelrelay_platform::log::print_error(&format!("modelrelay: {why}"));
    ExitCode::FAILURE
}

//! Shell completions and manual pages, generated from a program's own command line so that they cannot diverge from it.
//!
//! The programs share this code and nothing else: each passes its [`clap::Command`].

use std::io;
use std::path::PathBuf;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// Arguments of `completions`.
#[derive(Clone, Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell for which to generate completions
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Clone, Debug, clap::Args)]
pub struct ManArgs {
    /// Folder to which the pages of all commands are written; without it, the program's own page is printed
    #[arg(long, value_name = "DIR")]
    pub write: Option<PathBuf>,
}

/// Returns the completion script for a shell. Unlike clap_complete, it does not propose what the help hides.
pub fn completions(command: &Command, args: &CompletionsArgs) -> String {
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut shown = Command::new("program").args(command.get_arguments().cloned()).subcommands(shown);
    if command.get_version().is_some() {
        // The version itself does not matter: it enables the flag.
        shown = shown.version("");
    }
    let (mut script, name) = (Vec::new(), command.get_name());
    clap_complete::generate(args.shell, &mut shown, name, &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    // For bash, clap_complete 4.6 writes a hyphen of the program's name in two ways, so nothing after a subcommand is
    // completed: https://github.com/clap-rs/clap/issues/6421. Once that is fixed, this changes nothing.
    let state = |hyphen| format!("{}__subcmd__", name.replace('-', hyphen));
    script.replace(&state("__subcmd__"), &state("__"))
}

/// Returns the program's page, or nothing if the pages are written to a folder. The error names that folder.
pub fn man(command: Command, args: &ManArgs) -> Result<Vec<u8>, String> {
    // Its page would repeat `--help`.
    let command = command.disable_help_subcommand(true);
    let Some(folder) = &args.write else {
        let mut page = Vec::new();
        Man::new(command).render(&mut page).map_err(|error| error.to_string())?;
        return Ok(page);
    };
    let failed = |error: io::Error| format!("cannot write to {}: {error}", folder.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(command, folder).map_err(failed)?;
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ValueEnum};

    use super::*;

    fn command() -> Command {
        let hidden = Command::new("secret-handshake").hide(true);
        let check = Command::new("check").about("Checks").arg(Arg::new("file").long("file").env("FILE"));
        Command::new("program").version("1.2.3").about("Does it").subcommand(check).subcommand(hidden)
    }

    fn text(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn completions_list_commands_for_every_shell() {
        for &shell in Shell::value_variants() {
            let script = completions(&command(), &CompletionsArgs { shell });
            assert!(["check", "file", "version"].iter().all(|word| script.contains(word)), "{shell}: {script}");
            assert!(!script.contains("handshake"), "{shell}: {script}");
        }
    }

    #[test]
    fn man_pages_cover_program_and_every_command() {
        let page = text(man(command(), &ManArgs { write: None }).unwrap());
        assert!(page.contains("program\\-check(1)") && !page.contains("secret"), "{page}");
        let folder = tempfile::tempdir().unwrap();
        let write = Some(folder.path().join("man1"));
        man(command(), &ManArgs { write }).unwrap();
        let page = std::fs::read_to_string(folder.path().join("man1/program-check.1")).unwrap();
        assert!(page.contains("\\-\\-file") && page.contains("FILE"), "{page}");
        assert!(folder.path().join("man1/program.1").exists());
        assert!(!folder.path().join("man1/program-secret-handshake.1").exists());
    }

    #[test]
    fn unwritable_folder_is_named_in_error() {
        let error = man(command(), &ManArgs { write: Some("/proc/no/such".into()) }).unwrap_err();
        assert!(error.starts_with("cannot write to /proc/no/such: "), "{error}");
    }
}

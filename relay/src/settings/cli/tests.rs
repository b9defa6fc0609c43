use super::*;
use modelrelay_protocol::units::format_size;

fn load(arguments: &[&str]) -> Result<Args, CliError> {
    let program = std::iter::once("modelrelay-relay");
    Args::load_from(program.chain(arguments.iter().copied()))
}

fn refusal(arguments: &[&str]) -> String {
    match load(arguments) {
        Err(CliError::Invalid(line)) => line,
        Err(CliError::Information(text)) => panic!("information: {text}"),
        Ok(_) => panic!("{arguments:?} was accepted"),
    }
}

#[test]
fn defaults_match_contract() {
    let args = load(&[]).expect("defaults");
    assert_eq!(args.listen_addr.to_string(), "127.0.0.1:8080");
    assert_eq!((args.provider_name.as_str(), args.max_queue_len, args.relay_count), ("local", 1000, 1));
    assert_eq!((args.max_queue_bytes, args.max_request_bytes), (256 << 20, limits::MAX_REQUEST_BYTES));
    assert_eq!(
        (args.max_buffered_bytes, args.max_stream_bytes),
        (limits::MAX_BUFFERED_BYTES, limits::MAX_STREAM_BYTES)
    );
    assert_eq!(
        (args.max_unread_bytes, args.heartbeat_interval),
        (limits::MAX_UNREAD_BYTES, limits::HEARTBEAT_INTERVAL)
    );
    assert_eq!((args.queue_timeout_secs, args.cold_timeout_secs, args.request_timeout_secs), (None, None, None));
    assert_eq!(args.stream_idle_timeout_secs, Duration::from_secs(300));
    assert!(args.workers_on_client_port && !args.require_api_keys && !args.require_protocol_version);
    assert!(args.given_provider_settings.is_empty() && args.trusted_proxies.0.is_empty());
}

#[test]
fn every_flag_has_variable_and_help_text() {
    for argument in Args::command().get_arguments() {
        assert!(argument.get_env().is_some(), "{} has no variable", argument.get_id());
        assert!(argument.get_help().is_some(), "{} has no help", argument.get_id());
    }
    let variables: Vec<String> = Args::settings().into_iter().map(|setting| setting.variable).collect();
    for (_, variable) in PROVIDER_SETTINGS {
        assert!(variables.iter().any(|known| known == variable), "{variable} is not a setting");
    }
}

#[test]
fn invalid_value_error_names_setting_value_and_limits() {
    let cases = [
        (["--listen-addr", "nowhere"], "LISTEN_ADDR (--listen-addr): \"nowhere\" is not allowed: "),
        (["--max-queue-len", "-1"], "MAX_QUEUE_LEN (--max-queue-len): \"-1\" is not allowed: "),
        (["--queue-timeout-secs", "0"], "QUEUE_TIMEOUT_SECS (--queue-timeout-secs): \"0\" is not allowed: "),
        (["--max-request-bytes", "32MB"], "MAX_REQUEST_BYTES (--max-request-bytes): \"32MB\" is not allowed: "),
        (["--require-api-keys", "yes"], "MODELRELAY_REQUIRE_API_KEYS (--require-api-keys): \"yes\" is not allowed: "),
        (["--log-format", "xml"], "LOG_FORMAT (--log-format): \"xml\" is not allowed: "),
        (["--log-level", "loud=noise"], "LOG_LEVEL (--log-level): \"loud=noise\" is not allowed: "),
        (["--trusted-proxies", "10.0.0.0/99"], "TRUSTED_PROXIES (--trusted-proxies): \"10.0.0.0/99\" is not allowed: "),
        (["--provider-name", "a b"], "PROVIDER_NAME (--provider-name): \"a b\" is not allowed: "),
    ];
    for (arguments, start) in cases {
        let line = refusal(&arguments);
        assert!(line.starts_with(start) && line.len() > start.len() && !line.contains('\n'), "{line}");
    }
}

#[test]
fn unknown_flag_error_is_one_line() {
    let line = refusal(&["--no-such-flag"]);
    assert!(line.contains("--no-such-flag") && !line.contains('\n'), "{line}");
}

#[test]
fn booleans_are_words_digits_or_bare_flag() {
    for (arguments, expected) in [
        (vec!["--require-api-keys"], true),
        (vec!["--require-api-keys", "1"], true),
        (vec!["--require-api-keys=true"], true),
        (vec!["--require-api-keys", "0"], false),
        (vec!["--modelrelay-require-api-keys", "false"], false),
    ] {
        assert_eq!(load(&arguments).expect("a boolean").require_api_keys, expected, "{arguments:?}");
    }
}

#[test]
fn flags_of_published_relay_are_accepted() {
    let args = ["--listen", "127.0.0.1:1", "--provider", "p", "--queue-timeout", "7", "--request-timeout", "8"];
    let args = load(&args).expect("valid");
    assert_eq!((args.listen_addr.port(), args.provider_name.as_str()), (1, "p"));
    let secs = |secs| Some(Duration::from_secs(secs));
    assert_eq!((args.queue_timeout_secs, args.request_timeout_secs), (secs(7), secs(8)));
}

#[test]
fn provider_settings_that_were_given_are_listed() {
    let args = load(&["--worker-secret", "s", "--max-queue-len", "100", "--relay-count", "2"]).expect("valid");
    assert_eq!(args.given_provider_settings, ["WORKER_SECRET", "MAX_QUEUE_LEN"]);
}

#[test]
fn help_and_debug_never_show_secrets() {
    let args = load(&["--worker-secret", "planted", "--admin-token", "planted"]).expect("valid");
    assert!(!format!("{args:?}").contains("planted"));
    assert!(matches!(load(&["--help"]), Err(CliError::Information(text)) if text.contains("--worker-secret")));
}

#[test]
fn default_sizes_are_shown_with_units() {
    let defaults: Vec<_> = Args::settings().into_iter().map(|setting| (setting.variable, setting.default)).collect();
    let default =
        |variable: &str| defaults.iter().find(|(name, _)| name == variable).and_then(|(_, value)| value.clone());
    assert_eq!(default("MAX_REQUEST_BYTES"), Some(format_size(limits::MAX_REQUEST_BYTES)));
    assert_eq!(default("MAX_UNREAD_BYTES"), Some(format_size(limits::MAX_UNREAD_BYTES)));
}

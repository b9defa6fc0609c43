//! All drivers of the multiplexer in one table of tests, and tests of single kinds of backends.
//!
//! Real: llama-server alone and as a router, Ollama, the demo backend, shell commands. Fakes: vLLM, SGLang, and an API
//! server of Kubernetes. The drivers `process` and `vllm-sleep` with real vLLM are in `tests/plain`.

mod hooks;
mod kubernetes;
mod llama_router;
mod ollama;
mod process;
mod rig;
mod sglang;
mod table;
mod vllm;

/// Generates one module per driver, with every row of the table.
macro_rules! every_driver {
    ($($driver:ident),* $(,)?) => {
        $(mod $driver {
            every_driver!(@rows $driver: loaded_model_serves, repeated_load_changes_nothing,
                repeated_eviction_succeeds_and_model_is_gone, eviction_of_unloaded_model_succeeds,
                models_swap_and_swap_back, wrong_model_fails_load,
                unconfigured_model_is_named, unreachable_backend_is_reported_by_check, dead_backend_is_detected,
                forced_eviction_works_in_every_state, abandoned_load_leaves_nothing_behind);
        })*
    };
    (@rows $driver:ident: $($row:ident),*) => {
        $(#[tokio::test]
        async fn $row() {
            if let Some(rig) = crate::rig::$driver().await {
                crate::table::$row(rig).await;
            }
        })*
    };
}

mod every {
    every_driver!(
        static_url,
        process,
        llama_router,
        ollama,
        vllm_started_by_us,
        vllm_started_by_others,
        vllm_at_level_two,
        sglang_started_by_us,
        sglang_started_by_others,
        hooks,
        kubernetes,
    );
}

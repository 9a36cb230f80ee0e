//! What is in deploy/: rules, dashboard and units name what there is, and their own tools find nothing to complain of.

use crate::quarry;
use quarry::{admin::BootstrapPlan, metrics::catalogue};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|wrong| panic!("{path}: {wrong}"))
}

/// What a tool says; none if it is not installed.
fn tool(name: &str, arguments: &[&str], folder: &Path) -> Option<Output> {
    match Command::new(name).args(arguments).current_dir(folder).output() {
        Ok(output) => Some(output),
        Err(wrong) if wrong.kind() == io::ErrorKind::NotFound => {
            eprintln!("{name} is not installed: this is not checked here");
            None
        }
        Err(wrong) => panic!("{name}: {wrong}"),
    }
}

fn must_be_content(output: Option<Output>) {
    let Some(output) = output else { return };
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

/// The strings behind `key: ` in a YAML file whose values are quoted as in JSON.
fn yaml_strings(text: &str, key: &str) -> Vec<String> {
    let values = text.lines().filter_map(|line| line.trim().strip_prefix(key));
    values.map(|value| serde_json::from_str(value).unwrap_or_else(|wrong| panic!("{key} {value}: {wrong}"))).collect()
}

fn rule_expressions() -> Vec<String> {
    let expressions = yaml_strings(&read("deploy/prometheus/rules.yml"), "expr: ");
    assert!(expressions.len() > 20, "{}", expressions.len());
    expressions
}

fn dashboard() -> Value {
    serde_json::from_str(&read("deploy/grafana/quarry.json")).unwrap()
}

fn dashboard_expressions() -> Vec<String> {
    let dashboard = dashboard();
    let targets = dashboard["panels"].as_array().unwrap().iter().filter_map(|panel| panel["targets"].as_array());
    let expressions: Vec<String> = targets.flatten().map(|it| it["expr"].as_str().unwrap().to_owned()).collect();
    assert!(expressions.len() > 30, "{}", expressions.len());
    expressions
}

/// Names in an expression that begin with `quarry_`.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let letter = |byte: char| byte.is_ascii_alphanumeric() || byte == '_' || byte == ':';
    let words = expression.split(|byte| !letter(byte));
    words.filter(|word| word.starts_with("quarry_")).map(ToOwned::to_owned).collect()
}

#[test]
fn every_metric_that_rules_and_dashboard_name_is_shown_by_some_process() {
    let catalogue = catalogue();
    let mut named = BTreeSet::new();
    for expression in rule_expressions().iter().chain(&dashboard_expressions()) {
        for name in metrics_in(expression) {
            let series = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let known = catalogue.contains_key(&name) || series.is_some_and(|it| catalogue.contains_key(it));
            assert!(known, "{name} is in no process: {expression}");
            named.insert(name);
        }
    }
    assert!(named.len() > 30, "{named:?}");
}

#[test]
fn every_rule_that_is_used_is_recorded() {
    let rules = read("deploy/prometheus/rules.yml");
    let recorded: BTreeSet<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).collect();
    for expression in rule_expressions() {
        for word in expression.split(|byte: char| !(byte.is_ascii_alphanumeric() || byte == '_' || byte == ':')) {
            assert!(!word.starts_with("quarry:") || recorded.contains(word), "{word} is not recorded: {expression}");
        }
    }
}

#[test]
fn every_alert_has_a_runbook_that_is_there() {
    let rules = read("deploy/prometheus/rules.yml");
    let page = read("docs/operations.md");
    let anchors: BTreeSet<String> = page
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim().to_ascii_lowercase().replace(' ', "-"))
        .collect();
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let runbooks: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("runbook_url: ")).collect();
    assert!(alerts.len() > 15 && alerts.len() == runbooks.len(), "{alerts:?} {runbooks:?}");
    for (alert, runbook) in alerts.iter().zip(runbooks) {
        let anchor = runbook.strip_prefix("docs/operations.md#").unwrap_or_else(|| panic!("{runbook}"));
        assert!(anchors.contains(anchor), "{alert}: docs/operations.md has no heading for #{anchor}");
    }
}

#[test]
fn promtool_takes_the_rules_and_their_unit_tests_hold() {
    let folder = root().join("deploy/prometheus");
    must_be_content(tool("promtool", &["check", "rules", "rules.yml"], &folder));
    must_be_content(tool("promtool", &["test", "rules", "rules_test.yml"], &folder));
    must_be_content(tool("promtool", &["check", "config", "prometheus.example.yml"], &folder));
}

#[test]
fn every_expression_of_the_dashboard_is_one_for_promtool() {
    // As rules, so that one call checks them all; what Grafana fills in is filled in.
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (number, expression) in dashboard_expressions().iter().enumerate() {
        let expression = expression.replace("$__rate_interval", "1m").replace("$cluster", ".*");
        assert!(!expression.contains('$'), "{expression}");
        rules += &format!("      - record: expression_{number}\n        expr: {}\n", Value::from(expression));
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("rules.yml"), rules).unwrap();
    must_be_content(tool("promtool", &["check", "rules", "rules.yml"], dir.path()));
}

#[test]
fn the_dashboard_keeps_its_name_and_asks_the_data_source_that_is_chosen() {
    let dashboard = dashboard();
    assert_eq!(dashboard["uid"], "quarry");
    let variables: Vec<&str> =
        dashboard["templating"]["list"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(variables, ["datasource", "cluster"]);
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        assert!(panel["type"] == "row" || panel["datasource"]["uid"] == "${datasource}", "{panel}");
    }
}

#[test]
fn kubectl_puts_the_manifests_together() {
    must_be_content(tool("kubectl", &["kustomize", "deploy/kubernetes/base"], &root()));
}

#[test]
fn the_nodes_of_every_example_take_their_configuration_and_the_files_that_are_made_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let files = dir.path().join("files");
    let made = Command::new(root().join("deploy/cluster-files"))
        .arg(&files)
        .args(["1=meta-1:7400", "2=meta-2:7400", "3=meta-3:7400", "--", "101", "102"])
        .env("QUARRY", env!("CARGO_BIN_EXE_quarry"))
        .output();
    must_be_content(Some(made.unwrap()));
    let plan = BootstrapPlan::read(&files.join("bootstrap.toml")).unwrap();
    assert_eq!(plan.metas.iter().map(|meta| meta.node).collect::<Vec<_>>(), [1, 2, 3]);
    for (role, config, key) in [
        ("meta", "systemd/meta.example.toml", "meta-1"),
        ("meta", "compose/meta.toml", "meta-2"),
        ("meta", "kubernetes/base/meta.toml", "meta-3"),
        ("datanode", "systemd/datanode.example.toml", "data-101"),
        ("datanode", "compose/datanode.toml", "data-102"),
        ("datanode", "kubernetes/base/datanode.toml", "data-101"),
    ] {
        let text = read(&format!("deploy/{config}"));
        // As many shards as the plan makes.
        assert!(role != "meta" || text.contains(&format!("shards = {}", plan.shards)), "{config}");
        let mut check = quarry();
        check.arg(role).arg("--check-config").arg("--config").arg(root().join("deploy").join(config));
        if !config.starts_with("systemd") {
            // Containers are told what they are called by their environment.
            check.env("QUARRY_NODE__ADVERTISE", format!("{key}:7500"));
        }
        check.arg("--cluster").arg(files.join("cluster.toml")).arg("--key").arg(files.join(key).join("node.key"));
        must_be_content(Some(check.output().unwrap()));
    }
}

#[test]
fn systemd_takes_the_units() {
    let dir = tempfile::tempdir().unwrap();
    for unit in ["quarry-meta@", "quarry-datanode@"] {
        // The binary is where it was built, and the template is looked at as one of its instances.
        let text = read(&format!("deploy/systemd/{unit}.service"));
        assert!(text.contains("Type=notify\n") && text.contains("TimeoutStartSec=infinity\n"), "{unit}");
        let text = text.replace("/usr/bin/quarry", env!("CARGO_BIN_EXE_quarry"));
        for name in [format!("{unit}.service"), format!("{unit}1.service")] {
            fs::write(dir.path().join(name), &text).unwrap();
        }
    }
    for unit in ["quarry-meta@1.service", "quarry-datanode@1.service"] {
        let Some(output) = tool("systemd-analyze", &["verify", &format!("./{unit}")], dir.path()) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !said.contains("Unknown"), "{unit}: {said}");
    }
}

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What DevStack runs in each of its phases: stack pre-install|install|post-config|extra|test-config, unstack, clean.
# Everything that may be chosen is in settings.

# Where clients of ZooKeeper connect.
function moorage_zookeeper_hosts {
    echo "${MOORAGE_ZOOKEEPER_HOSTS:-$SERVICE_HOST:2181}"
}

# Whether this machine shall run a ZooKeeper.
function moorage_runs_zookeeper {
    is_service_enabled moorage-zookeeper && [[ -z "$MOORAGE_ZOOKEEPER_HOSTS" ]]
}

function install_moorage_zookeeper {
    if is_ubuntu; then
        install_package zookeeperd
    else
        install_package zookeeper
    fi
}

# One server with a folder of DevStack's, so that clean.sh can remove what it kept.
function configure_moorage_zookeeper {
    local conf=/etc/zookeeper/conf/zoo.cfg
    sudo install -d -o zookeeper -g zookeeper "$MOORAGE_ZOOKEEPER_DATA"
    sudo tee "$conf" >/dev/null <<ZOO
tickTime=2000
initLimit=10
syncLimit=5
dataDir=$MOORAGE_ZOOKEEPER_DATA
clientPort=2181
4lw.commands.whitelist=ruok,srvr,mntr
ZOO
}

function install_moorage {
    setup_develop "$MOORAGE_DIR" zookeeper,mysql,postgresql,rabbitmq,keystone
}

function configure_moorage {
    sudo install -d -o "$STACK_USER" "$MOORAGE_CONF_DIR"
    sudo install -d -o "$STACK_USER" "$MOORAGE_STATE_DIR"
    rm -f "$MOORAGE_CONF"
    iniset "$MOORAGE_CONF" control_plane state_dir "$MOORAGE_STATE_DIR"
    iniset "$MOORAGE_CONF" database connection "$(database_connection_url moorage)"
    iniset "$MOORAGE_CONF" rpc transport_url "$(get_transport_url)"
    iniset "$MOORAGE_CONF" api bind "$(ipv6_unquote "$SERVICE_LISTEN_ADDRESS"):$MOORAGE_API_PORT"
    if is_service_enabled moorage-zookeeper || [[ -n "$MOORAGE_ZOOKEEPER_HOSTS" ]]; then
        iniset "$MOORAGE_CONF" coordination periodic_coordination_backend "zookeeper://$(moorage_zookeeper_hosts)"
    fi
    if is_service_enabled keystone; then
        iniset "$MOORAGE_CONF" api auth_strategy keystone
        # DevStack's administrator has a token of a project.
        iniset "$MOORAGE_CONF" api enforce_scope False
        configure_keystone_authtoken_middleware "$MOORAGE_CONF" moorage
    else
        iniset "$MOORAGE_CONF" api auth_strategy http_basic
        iniset "$MOORAGE_CONF" api http_basic_auth_user_file "$MOORAGE_CONF_DIR/users"
    fi
    chmod 600 "$MOORAGE_CONF"
}

function create_moorage_accounts {
    create_service_user moorage admin
    get_or_create_service moorage fleet "Moorage"
    get_or_create_endpoint fleet "$REGION_NAME" \
        "$SERVICE_PROTOCOL://$SERVICE_HOST:$MOORAGE_API_PORT/scheduling/v1"
}

function init_moorage {
    recreate_database moorage
    moorage-manage --config-file "$MOORAGE_CONF" db upgrade
    if ! is_service_enabled keystone; then
        moorage-manage --config-file "$MOORAGE_CONF" user set admin --password-file - <<<"$ADMIN_PASSWORD"
    fi
}

function start_moorage_zookeeper {
    start_service zookeeper
}

function start_moorage {
    local role
    for role in api scheduler agent engine; do
        run_process "moorage-$role" "$MOORAGE_BIN_DIR/moorage $role --config-file $MOORAGE_CONF"
    done
    if is_service_enabled moorage-api; then
        wait_for_service "$SERVICE_TIMEOUT" "http://$SERVICE_HOST:$MOORAGE_API_PORT/healthcheck" ||
            die $LINENO "moorage-api did not start; see journalctl --unit devstack@moorage-api"
    fi
}

function stop_moorage {
    local role
    # Who takes requests first; then who does the work, so that it can end what it has begun.
    for role in api scheduler engine agent; do
        stop_process "moorage-$role"
    done
}

function clean_moorage {
    sudo rm -rf "$MOORAGE_STATE_DIR" "$MOORAGE_CONF_DIR"
    if moorage_runs_zookeeper; then
        sudo rm -rf "$MOORAGE_ZOOKEEPER_DATA"
    fi
}

function moorage_phase {
    case "$1 ${2:-}" in
        "stack pre-install") if moorage_runs_zookeeper; then install_moorage_zookeeper; fi ;;
        "stack install") install_moorage ;;
        "stack post-config")
            if moorage_runs_zookeeper; then configure_moorage_zookeeper; fi
            configure_moorage
            if is_service_enabled keystone; then create_moorage_accounts; fi
            ;;
        "stack extra")
            init_moorage
            if moorage_runs_zookeeper; then start_moorage_zookeeper; fi
            start_moorage
            ;;
        "unstack ")
            stop_moorage
            if moorage_runs_zookeeper; then stop_service zookeeper; fi
            ;;
        "clean ") clean_moorage ;;
    esac
}

if is_service_enabled moorage-api moorage-scheduler moorage-agent moorage-engine; then
    MOORAGE_BIN_DIR=$(get_python_exec_prefix)
    moorage_phase "$@"
fi

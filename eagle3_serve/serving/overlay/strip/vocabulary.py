"""What is known of functions and methods: which only look, which change something, which are there for debugging.

Lists and not rules: what is not listed is not known, and a statement that depends on it is left to a person.
"""

from __future__ import annotations

import sys


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Python's own functions that only look at their arguments.
LOOKING = _words(
    "len str repr int float bool complex bytes type id isinstance issubclass hasattr getattr callable abs round format "
    "hex bin oct chr ord ascii divmod pow slice range vars dir hash locals globals"
)
# The same, but they use up an iterator that they are given.
ITERATING = _words("list tuple set frozenset dict sum min max sorted any all enumerate zip reversed")

# Of tensors and of nothing that could be a module.
TENSOR_METHODS = _words(
    "item norm mean sum std var min max amin amax abs tolist numpy detach clone size dim ndimension numel nelement "
    "stride is_contiguous contiguous element_size data_ptr flatten reshape view squeeze unsqueeze transpose permute t "
    "isnan isinf isfinite any all argmax argmin topk count_nonzero nonzero unique diff square sqrt rsqrt pow log log2 "
    "exp softmax log_softmax sigmoid allclose equal eq ne lt le gt ge cumsum chunk split unbind narrow select expand "
    "median mode histc quantile dot matmul mv mm masked_select index_select gather prod cosine_similarity "
    "storage_offset untyped_storage nbytes dist isclose neg sign clamp round floor ceil logical_not"
)
# Of tensors, where they make a new one, and of modules, which they change in place.
CONVERTING = _words("float double half bfloat16 to cpu type int long bool")
# Of strings, dicts, lists, modules and SGLang's enumerations; they only look.
METHODS = _words(
    "format upper lower title strip lstrip rstrip startswith endswith replace rjust ljust center zfill encode decode "
    "hex splitlines partition rpartition casefold isdigit keys values items copy index count bit_length total_seconds "
    "isoformat strftime state_dict parameters named_parameters modules named_modules buffers named_buffers children "
    "named_children elapsed_time current_device __len__ __repr__ __str__"
)
# These even where they are called on self.
OF_MODULES = _words(
    "state_dict parameters named_parameters modules named_modules buffers named_buffers children named_children"
)
# What these give can be gone through again, or is made anew by the call.
FRESH_ITERABLES = METHODS | TENSOR_METHODS

MODULE_FUNCTIONS = _words(
    "time.time time.time_ns time.perf_counter time.perf_counter_ns time.monotonic time.monotonic_ns time.process_time "
    "time.strftime time.ctime time.localtime time.gmtime os.getpid os.getppid os.getenv os.environ.get os.getcwd "
    "os.path.basename os.path.dirname os.path.join os.path.exists os.path.abspath os.path.getsize math.sqrt "
    "math.isnan math.isinf math.isfinite math.log math.log2 math.exp math.ceil math.floor math.prod math.sqrt "
    "json.dumps datetime.datetime.now datetime.datetime.utcnow socket.gethostname threading.get_ident "
    "threading.current_thread threading.get_native_id sys.getsizeof sys._getframe sys.getrefcount "
    "traceback.format_stack traceback.format_exc traceback.extract_stack pprint.pformat textwrap.shorten "
    "inspect.getsource inspect.signature torch.norm torch.linalg.norm torch.linalg.vector_norm torch.mean torch.sum "
    "torch.max torch.min torch.abs torch.std torch.var torch.isnan torch.isinf torch.isfinite torch.any torch.all "
    "torch.allclose torch.equal torch.isclose torch.stack torch.cat torch.argmax torch.topk torch.unique "
    "torch.count_nonzero torch.cosine_similarity torch.nn.functional.cosine_similarity torch.dist torch.numel "
    "torch.is_tensor torch.get_default_dtype torch.is_grad_enabled torch.is_inference_mode_enabled torch.typename "
    "torch.cuda.memory_allocated torch.cuda.max_memory_allocated torch.cuda.memory_reserved torch.cuda.mem_get_info "
    "torch.cuda.current_device torch.cuda.get_device_name torch.cuda.is_available torch.cuda.memory_summary "
    "torch.cuda.is_current_stream_capturing torch.cuda.current_stream torch.cuda.Event "
    "torch.distributed.get_rank torch.distributed.get_world_size torch.distributed.is_initialized "
    "torch.distributed.is_available numpy.mean numpy.sum numpy.max numpy.min numpy.abs numpy.isnan numpy.allclose "
    "numpy.linalg.norm numpy.asarray numpy.array numpy.shape"
)
# SGLang's own, from any of its modules.
SGLANG_FUNCTIONS = _words(
    "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_attention_tp_rank get_attention_tp_size "
    "get_attention_dp_rank get_pp_group get_tp_group get_world_group get_is_capture_mode is_cuda is_hip"
)

# Contexts that do nothing to what is outside them.
NEUTRAL_CONTEXTS = _words(
    "torch.no_grad torch.inference_mode contextlib.nullcontext contextlib.suppress torch.profiler.record_function"
)

# Statements that are there for debugging, where something says that they are.
DEBUG_CALLS = _words(
    "torch.cuda.synchronize torch.save numpy.save numpy.savez torch.set_printoptions numpy.set_printoptions "
    "torch.cuda.nvtx.range_push torch.cuda.nvtx.range_pop torch.cuda.nvtx.mark traceback.print_stack "
    "traceback.print_exc sys.stdout.write sys.stderr.write sys.stdout.flush sys.stderr.flush pdb.set_trace"
)
PRINTERS = _words("pprint.pprint pprint.pp")
LOG_METHODS = _words("debug info warning warn error critical exception log")
LOGGERS = _words("logger log logging _logger _log LOGGER LOG")

# Methods that change what they are called on.
MUTATING = _words(
    "pop popitem append appendleft popleft extend insert remove clear update setdefault sort reverse add discard put "
    "put_nowait get_nowait set release acquire write writelines send close train eval cuda register_buffer "
    "register_forward_hook add_module load_state_dict load_weights step zero_grad backward fill"
)
# Python's own functions that change something or use something up.
ACTING = _words("next setattr delattr exec eval input open exit quit iter compile __import__")

_OTHER_MODULES = _words("torch numpy eagle3_serve.runtime.debug")


def harmless_import(module: str) -> bool:
    """Whether importing it has no effect but the time it takes: the standard library, torch, numpy, our own layer."""
    return module.partition(".")[0] in sys.stdlib_module_names - {"__future__", "this", "antigravity"} or any(
        module == other or module.startswith(f"{other}.") for other in _OTHER_MODULES
    )

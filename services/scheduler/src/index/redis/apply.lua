-- KEYS[1] meta  [2] due  [3] ended  [4] buckets  [5] key logs
-- ARGV[1] owner  [2] from  [3] to  [4] now, ms  [5] token of the clear before, or ''  [6] prefix of other keys
-- then lists, each its length and its values:
--   ids of jobs that have ended or are forgotten, ids that are forgotten, scores and ids that wait, ids that wait,
--   scores and ids that have ended, buckets that get records
--   buckets, for each: its name, ids and records that it gets, ids that it loses
--   hashes of keys that are taken no more
--   logs of keys, for each: its name, its life in ms, then a list of hash, life in ms and value of each key
-- Gives 'OK', 'FENCED', or 'GAP' and the mark.
-- A script that has written is not stopped by a full memory any more. So what ends jobs, and frees memory by that,
-- is taken when the memory is full, and what only adds jobs is not.
local meta = redis.call('HMGET', KEYS[1], 'owner', 'offset', 'cleared')
local owner, offset, cleared = meta[1], meta[2], meta[3]
if owner ~= ARGV[1] and (owner or offset) then
  return {'FENCED'}
elseif offset then
  if tonumber(offset) >= tonumber(ARGV[3]) then
    return {'OK'}
  elseif tonumber(offset) < tonumber(ARGV[2]) then
    return {'GAP', offset}
  end
elseif ARGV[5] == '' or cleared ~= ARGV[5] then
  return {'GAP', false}
end

local prefix = ARGV[6]
local at = 7

local function next_value()
  at = at + 1
  return ARGV[at - 1]
end

-- One call for many values; Lua's stack does not hold more than 8000.
local function call_with_list(command, key)
  local length = tonumber(next_value())
  local last = at + length - 1
  for first = at, last, 4000 do
    redis.call(command, key, unpack(ARGV, first, math.min(first + 3999, last)))
  end
  at = last + 1
  return length
end

call_with_list('ZREM', KEYS[2])
call_with_list('ZREM', KEYS[3])
call_with_list('ZADD', KEYS[2])
call_with_list('ZREM', KEYS[3])
call_with_list('ZADD', KEYS[3])
call_with_list('SADD', KEYS[4])
for _ = 1, tonumber(next_value()) do
  local bucket = next_value()
  local key = prefix .. 'job:' .. bucket
  call_with_list('HSET', key)
  if call_with_list('HDEL', key) > 0 and redis.call('EXISTS', key) == 0 then
    redis.call('SREM', KEYS[4], bucket)
  end
end

for _ = 1, tonumber(next_value()) do
  redis.call('UNLINK', prefix .. 'idem:' .. next_value())
end
for _ = 1, tonumber(next_value()) do
  local log, log_life = next_value(), next_value()
  local count = tonumber(next_value())
  local new = {}
  for start = 0, count - 1, 2000 do
    local some = math.min(count - start, 2000)
    local names = {}
    for i = 1, some do
      names[i] = prefix .. 'idem:' .. ARGV[at + (i - 1) * 3]
    end
    local known = redis.call('MGET', unpack(names))
    for i = 1, some do
      local hash, life, value = next_value(), next_value(), next_value()
      if known[i] ~= value then
        redis.call('SET', names[i], value, 'PX', life)
        new[#new + 1] = hash
      end
    end
  end
  if #new > 0 then
    redis.call('APPEND', prefix .. 'idemlog:' .. log, table.concat(new))
    redis.call('PEXPIRE', prefix .. 'idemlog:' .. log, log_life)
    if redis.call('SADD', KEYS[5], log) == 1 then
      -- A new log, which is not often: those that have expired meanwhile are taken from the set.
      for _, other in ipairs(redis.call('SMEMBERS', KEYS[5])) do
        if redis.call('EXISTS', prefix .. 'idemlog:' .. other) == 0 then
          redis.call('SREM', KEYS[5], other)
        end
      end
    end
  end
end

redis.call('HSET', KEYS[1], 'offset', ARGV[3], 'at', ARGV[4])
redis.call('HDEL', KEYS[1], 'cleared')
return {'OK'}
